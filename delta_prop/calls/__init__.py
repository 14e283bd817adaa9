"""What calls of the API take and return: checked arguments, receipts, acknowledgements, refusals."""
