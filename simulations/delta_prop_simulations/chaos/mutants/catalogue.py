"""All mutants: named faulty versions of the production code. The simulation must find each of them.

The quoted lines are production code; if that code changes, a test names the mutants to update.
"""

from __future__ import annotations

from delta_prop.client.ack_ranges import outcome_of
from delta_prop.client.producer_state import ProducerState
from delta_prop.client.sequence_sender import SequenceSender
from delta_prop.delivery.feed import Feed
from delta_prop.delivery.inbox import Inbox, Mailbox
from delta_prop.delivery.rebuild import Rebuilder
from delta_prop.delivery.sink_invoker import Deliverer
from delta_prop.partition.ack_tracker import AckTracker
from delta_prop.partition.core.appender import Appender
from delta_prop.partition.duplicate_batches import ack_duplicate
from delta_prop.partition.ingest.expectations import check_expects
from delta_prop.partition.order.orderer import Orderer
from delta_prop.partition.pipeline import Pipeline
from delta_prop.partition.storage.committer import Committer
from delta_prop.partition.storage.log_reopener import LogReopener
from delta_prop.server.connection_reader import FrameDispatcher
from delta_prop.server.log_reader import LogReader
from delta_prop.server.outcome_collector import OutcomeCollector
from delta_prop_broker.log.durable import DurableLog
from delta_prop_broker.log.writing import Commit
from delta_prop_broker.recovery.recovery import _Recovery
from delta_prop_broker.retention.snapshot_planner import SnapshotPlanner
from delta_prop_simulations.chaos.mutants.mutant import Mutant, edit, getter
from delta_prop_simulations.chaos.node import Node
from delta_prop_sinks.resident import ResidentVectors

_MUTANTS = (
    # --- the log on disk: syncs, recovery point, recovery, retention and compaction
    Mutant(
        "acknowledged-before-the-sync",
        "a delta is acknowledged as soon as it has its offset in memory",
        "an acknowledged delta survives all failures that its level covers",
        edit(
            DurableLog.offset_at_level,
            "marks.written if level is AckLevel.LOGGED else marks.synced",
            "marks.next_offset",
        ),
    ),
    Mutant(
        "sync-dropped",
        "written data counts as synced",
        "an acknowledged delta survives a power cut",
        edit(Commit._sync_written, "file.sync()", "file.size()"),
    ),
    Mutant(
        "directory-not-synced",
        "the name of a new segment is not synced",
        "an acknowledged delta survives a power cut",
        edit(Commit._create, "self._disk.sync_directory(self._directory)", "pass"),
    ),
    Mutant(
        "sealed-segment-not-synced",
        "a segment is not synced when it is sealed, whatever its commit asks for",
        "data below the recovery point survives a power cut",
        edit(
            Commit._sync_written,
            "if write.seals_segment or self._sync",
            "if self._sync and not write.seals_segment",
        ),
    ),
    Mutant(
        "failed-sync-retried",
        "a sync that failed is retried, and trusted the second time",
        "after a failed sync no delta is acknowledged before it is read back",
        edit(
            Commit._sync_written,
            "        file.sync()",
            "        try:\n            file.sync()\n        except OSError:\n            file.sync()",
        ),
    ),
    Mutant(
        "failed-commit-counts",
        "a commit that the disk refused counts as done",
        "no delta is acknowledged that the disk refused",
        edit(Committer._commit_all, "self._fail(error)\n            return", "pass"),
    ),
    Mutant(
        "recovery-point-before-the-sync",
        "the recovery point moves before anything is written",
        "data below the recovery point is on stable storage",
        edit(
            Committer._run,
            "await threads.run(commit.sync)\n    commit.conclude()",
            "commit.conclude()\n    await threads.run(commit.sync)",
        ),
    ),
    Mutant(
        "removed-before-the-recovery-point",
        "old segments are removed before the recovery point says that the log starts after them",
        "a log opens after a crash at any moment",
        edit(
            Commit.conclude,
            "self.synced > self._recovery_point.newest.synced or self.removed",
            "self.synced > self._recovery_point.newest.synced and not self.removed",
        ),
    ),
    Mutant(
        "cache-believed-at-opening",
        "data that a failed sync left in the cache counts as written at the next start",
        "rows that a log shows after its recovery survive the next power cut",
        edit(
            _Recovery._make_durable, "assert last.index is not None", "if not has_torn_tail:\n        return"
        ),
    ),
    Mutant(
        "read-before-the-commit",
        "readers see rows that are only appended",
        "no row is visible that the log may still lose",
        edit(
            getter(DurableLog, "high_watermark"),
            "return self._marks.high_watermark",
            "return self._marks.next_offset",
        ),
    ),
    Mutant(
        "removed-before-the-snapshot",
        "segments are removed before a snapshot holds their states",
        "a sink can be rebuilt from the log",
        edit(
            SnapshotPlanner.floor,
            "return min(readable, self.present.offset or 0) if self._settings.compact else readable",
            "return readable",
        ),
    ),
    # --- the pipeline: duplicates, causal order, refusals, and the state that a start restores
    Mutant(
        "watermarks-forgotten",
        "a start does not restore the watermark of each origin",
        "a duplicate has one effect, across a restart too",
        edit(
            Pipeline.restore,
            "self.orderer.note_delivered(batch.origin, batch.last, accepted_ids(batch))",
            "pass",
        ),
    ),
    Mutant(
        "duplicate-given-a-new-offset",
        "a duplicate is acknowledged with an offset at the log's end",
        "a duplicate is acknowledged with the offset of its first copy",
        edit(
            ack_duplicate,
            "    return PublishAck(offsets[0], batch",
            (
                "    offsets = {row: log.next_offset - batch.count + row for row in offsets}\n"
                "    return PublishAck(offsets[0], batch"
            ),
        ),
    ),
    Mutant(
        "state-moves-without-the-log",
        "watermarks move though the log has refused the batch",
        "every acknowledged delta is in the log",
        edit(
            Pipeline._append,
            "        self._refuse_all(self.orderer.refuse(entry, refusal))",
            (
                "        self.orderer.note_delivered(entry.origin, entry.last)\n"
                "        self._refuse_all(self.orderer.refuse(entry, refusal))"
            ),
        ),
    ),
    Mutant(
        "parents-ignored",
        "a delta does not wait for its parents",
        "the log's order is causal",
        edit(Orderer.check, "return not entry.parents or self._has_parents(entry)", "return True"),
    ),
    Mutant(
        "noop-not-logged",
        "the dot of a delta that is finally refused stays open",
        "deltas after a refused one are processed",
        edit(
            Appender.append_sequenced,
            (
                "if (\n"
                "                not refusal.is_final\n"
                "                or refusal.code is ErrorCode.UNAUTHORIZED\n"
                "                or _is_split_by_sender(work)\n"
                "            ):\n"
                "                raise"
            ),
            "raise",
        ),
    ),
    Mutant(
        "expect-ignored",
        "a delta is accepted though its vector's head is not the one that it expects",
        "of two writers that expect the same head one is refused",
        edit(check_expects, "expects.get(row)", "None"),
    ),
    Mutant(
        "expect-judged-before-the-batch",
        "expected heads of a batch's rows are compared with the vectors before the entire batch",
        "of two rows of a batch that expect the same head one is refused",
        edit(check_expects, "heads[ref] = Head(", "_ = Head("),
    ),
    Mutant(
        "lamport-forgotten",
        "a start does not restore the highest Lamport number",
        "in one service Lamport numbers rise with the log",
        edit(Appender.restore, "self.lamport = max(self.lamport, logged.lamport + batch.count - 1)", "pass"),
    ),
    Mutant(
        "failure-reported-as-success",
        "callers that wait for a failed commit get a success",
        "no delta is acknowledged that the disk refused",
        edit(AckTracker._resolve, "None if part.next_offset <= end else refusal", "None"),
    ),
    Mutant(
        "delivered-before-the-commit",
        "sinks get a batch as soon as it has its offset",
        "no row is visible that the log may still lose",
        edit(
            AckTracker.route_when_visible,
            "not self._not_visible and logged.next_offset <= self._log.high_watermark",
            "True",
        ),
    ),
    Mutant(
        "state-retained-after-a-failure",
        "a log that was recovered in place continues with the old pipeline state",
        "the pipeline's state is the one that its log yields",
        edit(LogReopener._try, "await self._storage.rebuild_state()", "pass"),
    ),
    # --- a log that fails and is recovered in place: lost rows reported as stored, or stored rows as refused
    Mutant(
        "watermark-of-a-failed-log",
        "a hello is answered with watermarks that count rows which may be lost, and these rows are "
        "acknowledged",
        "every acknowledged delta is in the log, even after the log failed and was recovered",
        edit(Pipeline.check_running, "if self.stop_refusal is not None:", "if False:"),
        edit(
            FrameDispatcher._finish_hello, "context.partition.pipeline.when_reached(answer)", "answer(None)"
        ),
        edit(
            ProducerState.on_welcome,
            "sender.requeue_all(lost=lost_count > 0, is_lost=self._senders.is_lost)\n",
            (
                "sender.requeue_all(lost=lost_count > 0, is_lost=self._senders.is_lost)\n"
                "        for frame in sender.retries.copy():\n"
                "            is_known = frame.batch.last <= sender.watermark\n"
                "            if is_known and not frame.is_outcome_query:\n"
                "                sender.retries.remove(frame)\n"
                "                self._settle_acked(frame)\n"
            ),
        ),
        edit(
            outcome_of,
            "return unknown_outcome(batch.dot(row))",
            "return PublishAck(0, batch.dot(row), count, level, dict.fromkeys(range(count), 0))",
        ),
    ),
    Mutant(
        "doubt-reported-as-refused",
        "rows written when a sync failed are reported as refused before the recovery has decided",
        "a refused delta never takes effect",
        edit(Pipeline.stop, "self.ack_tracker.suspend(refusal)", "self.ack_tracker.fail(refusal)"),
    ),
    # --- delivery to sinks: cursors, failures, mailboxes, quarantine and rebuilds
    Mutant(
        "failed-delivery-not-retried",
        "a delivery that failed is not retried",
        "a sink gets each delta at least once",
        edit(
            Deliverer.deliver,
            "deliveries = await self._handle_failure(deliveries, called, failure)",
            "await self._handle_failure(deliveries, called, failure)\n            break",
        ),
    ),
    Mutant(
        "full-mailbox-drops",
        "a delivery that finds the mailbox full is dropped, and not read from the log later",
        "a full mailbox loses nothing",
        edit(
            Feed.offer,
            "inbox.is_catching_up = True  # from now on it reads the log",
            "inbox.is_catching_up = inbox.is_catching_up or self.has_ended",
        ),
    ),
    Mutant(
        "mailbox-unbounded",
        "a mailbox accepts more than its bounds allow",
        "a slow sink costs no more memory than its mailbox",
        edit(Mailbox.put, "self._waiting and (deltas > self._deltas_max or size > self._bytes_max)", "False"),
    ),
    Mutant(
        "feed-not-notified",
        "a feed that waits is not woken by a push",
        "every row in the log reaches every sink",
        edit(Inbox.push, "self._wake_event.set()", "pass"),
    ),
    Mutant(
        "rebuild-misses-the-tail",
        "a sink that is rebuilt continues at the log's end, not at its snapshot's",
        "a rebuilt sink holds the same state as the log",
        edit(Rebuilder.run, "feed.restart_at(offset)", "feed.restart_at(self._log.high_watermark)"),
    ),
    Mutant(
        "feed-pushed-too-early",
        "a sink that catches up is pushed to before it has reached the log's end",
        "a sink gets each delta at least once",
        edit(
            Inbox.read,
            "self.is_catching_up = self.end < self._log.high_watermark",
            "self.is_catching_up = False",
        ),
    ),
    Mutant(
        "folded-for-each-batch",
        "a call with late deltas folds their vectors for each of its batches, not once",
        "catching up after a network cut takes time in proportion to the missed deltas",
        edit(
            ResidentVectors.apply,
            "self._apply_one(delivery, context)\n",
            "self._apply_one(delivery, context)\n            await self._fold_deferred(context, pace)\n",
        ),
    ),
    # --- the network protocol: clients, the server's connections, groups and forwarding
    Mutant(
        "resent-under-new-dots",
        "a producer that reconnects gives new numbers to deltas that may have arrived",
        "a delta has one effect however often it is sent",
        edit(
            SequenceSender.requeue_all,
            "previous = self.watermark\n",
            (
                "previous = self.watermark\n"
                "    for frame in sorted(self.unacked.values(), key=lambda frame: -frame.batch.base):\n"
                "        if frame.send_count and not frame.is_outcome_query and not frame.is_withdrawn:\n"
                "            del self.unacked[frame.batch.base]\n"
                "            for row, offer in reversed(frame.offers):\n"
                "                rows = range(row, row + offer.count)\n"
                "                offer.deltas = [frame.batch.delta(at) for at in rows]\n"
                "                offer.columns, offer.counter, offer.after = None, None, ()\n"
                "                self.requeue_offers([offer])\n"
                "            highest = max(self.unacked, default=0)\n"
                "            self.next_counter = 1 + max(self.watermark, highest)\n"
            ),
        ),
    ),
    Mutant(
        "refusal-reported-as-acknowledged",
        "a refused delta is not reported, so that the next Ack covers it",
        "a producer is notified of each refusal",
        edit(OutcomeCollector.settle, "entry.refusal()) is not None:", "entry.refusal()) is None:"),
    ),
    Mutant(
        "ack-one-off",
        "an Ack names the offset after the right one",
        "an acknowledgement names the delta's offset",
        edit(
            OutcomeCollector._add_ranges,
            "first + published.count - 1, published.offset)",
            "first + published.count - 1, published.offset + 1)",
        ),
    ),
    Mutant(
        "credit-given-twice",
        "credit owed to a producer is granted twice",
        "the deltas in flight from all producers are bounded",
        edit(
            OutcomeCollector._take_owed_credit,
            "Credit(self.owed_deltas, self.owed_bytes)",
            "Credit(2 * self.owed_deltas, 2 * self.owed_bytes)",
        ),
    ),
    Mutant(
        "credit-never-given-back",
        "a producer does not get back the credit that it has spent",
        "a producer whose deltas are acknowledged can continue",
        edit(OutcomeCollector._take_owed_credit, "return credit", "return None"),
    ),
    Mutant(
        "pushed-before-it-was-read",
        "a subscriber that catches up is pushed to before it has reached the log's end",
        "a subscriber gets each delta of its topics",
        edit(
            LogReader.read,
            "self.is_catching_up = self.next_offset < log.high_watermark",
            "self.is_catching_up = False",
        ),
    ),
    # --- the simulation itself, which reports a violation where there is none
    Mutant(
        "judged-too-early",
        "a service counts as idle although readers do not see all rows of its log yet",
        "the simulation reports only real violations",
        edit(Node.waits_for, "if log.high_watermark < log.next_offset:", "if False:"),
    ),
)

MUTANTS = {mutant.name: mutant for mutant in _MUTANTS}
"""All mutants, by name, sorted by layer."""
