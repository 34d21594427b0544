"""One leg's way out of a worker as its rank 0 keeps count of it: which ranks have sent their part, and what it cost."""

from __future__ import annotations

from ..proto import worker_pb2 as pb
from .events import Sent


class SendReports:
    """Of one transfer of a worker with `ranks` ranks."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._reports: dict[int, Sent] = {}

    def add(self, rank: int, report: Sent) -> bool:
        """A rank's part was acknowledged. True: that was the last one."""
        if rank in self._reports:
            return False
        self._reports[rank] = report
        return len(self._reports) == self._ranks

    def event(self, leg: pb.LegRef, computed_at: float) -> pb.WorkerEvent:
        """For the router, once all ranks have reported. computed_at: when the last of the KV was in the pool."""
        reports = self._reports.values()
        moved = [report for report in reports if report.frames] or reports  # a rank may have had nothing to send
        began, ended = min(r.started_at for r in moved), max(r.ended_at for r in moved)
        return pb.WorkerEvent(
            sent=pb.Sent(
                leg=leg,
                bytes=sum(report.bytes for report in reports),
                frames=sum(report.frames for report in reports),
                transfer_s=ended - began,
                exposed_s=max(0.0, ended - max(began, computed_at)),
            )
        )
