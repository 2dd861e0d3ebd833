"""What is kept of files and batches, and how it is shown."""

import time
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

type Status = Literal[
    "validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling",
    "cancelled",
]  # fmt: skip

OPEN = ("validating", "in_progress", "finalizing", "cancelling")  # still to be worked on
STAMPS = (
    "in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at",
    "cancelled_at",
)  # fmt: skip
INPUT, OUTPUT = "batch", "batch_output"  # purposes of files


@dataclass(frozen=True)
class StoredFile:
    """A file that was uploaded, or that a batch has left."""

    file_id: str
    key_id: str  # whose it is
    filename: str  # the client's; names nothing on this disk
    purpose: str
    num_bytes: int
    created_at: int  # seconds since 1970, as all times here
    expires_at: int | None = None

    def fields(self) -> dict[str, Any]:
        return {
            "id": self.file_id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


@dataclass(frozen=True)
class Batch:
    """A batch as the database has it. `output_id` and `error_id` are chosen when it is made."""

    batch_id: str
    key_id: str
    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: str  # JSON
    created_at: int
    expires_at: int
    output_id: str
    error_id: str
    status: Status = "validating"
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    num_total: int = 0
    num_completed: int = 0
    num_failed: int = 0
    errors: str = "[]"  # JSON, of a batch that failed
    has_output: int = 0  # 1 once the file is there to be read
    has_errors: int = 0
    output_expires_s: int | None = None  # after the files that it leaves are made

    @property
    def is_open(self) -> bool:
        return self.status in OPEN

    @property
    def seconds_left(self) -> float:
        return self.expires_at - time.time()

    def fields(self) -> dict[str, Any]:
        errors = msgspec.json.decode(self.errors)
        shown: dict[str, Any] = {
            "id": self.batch_id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": errors} if errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_id if self.has_output else None,
            "error_file_id": self.error_id if self.has_errors else None,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
        }
        shown |= {name: getattr(self, name) for name in STAMPS}
        counts = {"total": self.num_total, "completed": self.num_completed,
                  "failed": self.num_failed}  # fmt: skip
        return shown | {"request_counts": counts, "metadata": msgspec.json.decode(self.metadata)}


def stamp(status: Status) -> dict[str, Any]:
    """The columns that say since when a batch has a status."""
    return {"status": status, f"{status}_at": int(time.time())}
