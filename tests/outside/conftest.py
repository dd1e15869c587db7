"""Leaves out the clients that are not installed; the end of a run lists them."""

import clients

collect_ignore = [f"test_{name}.py" for name in clients.missing()]
