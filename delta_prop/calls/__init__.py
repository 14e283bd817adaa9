"""Arguments and results of the API: checked arguments, receipts, acknowledgements, refusals."""
