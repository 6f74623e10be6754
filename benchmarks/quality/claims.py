"""Which jobs of ``quality.py`` are running, so that several processes can share the work."""

import os
import pathlib

from benchmarks.quality.jobs import Job


class Claims:
    """Which jobs other processes are running: one file a job, with the process's number."""

    def __init__(self, results: pathlib.Path):
        self._folder = results.with_suffix(".running")

    def _path(self, job: Job) -> pathlib.Path:
        return self._folder / "".join(c if c.isalnum() or c in "=.-" else "_" for c in job.key)

    def take(self, job: Job) -> bool:
        """Claims a job, unless a process that lives has."""
        self._folder.mkdir(exist_ok=True, parents=True)
        path = self._path(job)
        mine = path.with_name(f"{path.name}.{os.getpid()}")
        mine.write_text(str(os.getpid()))
        try:
            os.link(mine, path)  # With its content, so that nobody reads an empty claim.
        except FileExistsError:
            try:
                owner = int(path.read_text())
            except FileNotFoundError:
                return False  # Given back just now: the next look finds it.
            if _alive(owner):
                return False
            path.unlink(missing_ok=True)  # Its process was killed.
            return self.take(job)
        finally:
            mine.unlink(missing_ok=True)
        return True

    def drop(self, job: Job) -> None:
        """Gives a job back, done or not."""
        self._path(job).unlink(missing_ok=True)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
