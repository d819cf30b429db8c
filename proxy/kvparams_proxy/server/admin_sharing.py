"""Takes changes made through the admin API to the other workers of the proxy."""

from starlette.requests import Request

from kvparams_proxy.errors import ProxyError
from kvparams_proxy.workers.admin_writes import AdminWrite
from kvparams_proxy.workers.worker_link import WorkerLink

__all__ = ["remember_admin_body", "require_shareable", "share_admin_write"]


def require_shareable(request: Request) -> None:
    """Refuses a change that would reach this worker only.

    Raises:
        ProxyError: 409.
    """
    link: WorkerLink | None = request.state.worker
    if link is not None and link.admin_writes is None:
        message = (
            f"the proxy has {link.identity.count} workers and the change would reach only one of them; change the "
            "fleet file instead, or start the proxy with --workers 1"
        )
        raise ProxyError(409, "conflict_error", message, code="several_workers")


def remember_admin_body(request: Request, body: bytes) -> None:
    """Keeps the body of a change for `share_admin_write`."""
    request.state.admin_body = body


async def share_admin_write(request: Request) -> None:
    """Takes a change that has been made in this worker to the others.

    Raises:
        ProxyError: see `AdminWriteListener.written`.
    """
    link: WorkerLink | None = request.state.worker
    if link is not None and link.admin_writes is not None:
        body: bytes = getattr(request.state, "admin_body", b"")
        query = f"?{request.url.query}" if request.url.query else ""
        await link.admin_writes.written(AdminWrite(request.method, request.url.path + query, body))
