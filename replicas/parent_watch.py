"""An engine must not outlive its replica, however that ended."""

import multiprocessing
import os
import signal
import threading


def end_with_parent() -> None:
    """End this process as soon as the one that started it is gone.

    Ray ends the children of a worker that dies, but not where the node's Ray is killed as a whole.
    Without effect in a process that `multiprocessing` did not start.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
