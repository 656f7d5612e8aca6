"""The ASGI application of an edge: all routes, and the middleware that every request passes through."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from quire.serving.http.endpoints.admin import Admin
from quire.serving.http.endpoints.admin_lora import LOAD_PATH, UNLOAD_PATH, AdminLora
from quire.serving.http.endpoints.admin_prefixes import AdminPrefixes
from quire.serving.http.endpoints.admin_standby import AdminStandby
from quire.serving.http.endpoints.admin_trainer import AdminTrainer
from quire.serving.http.endpoints.ollama_format import write_error as write_ollama_error
from quire.serving.http.endpoints.registry import ENDPOINTS
from quire.serving.http.errors import ApiError
from quire.serving.http.exchange import AsgiHandler, Handler
from quire.serving.http.guard import Guard
from quire.serving.http.path_aliases import PathAliases, is_ollama, path_not_found
from quire.serving.http.service import Service
from quire.serving.http.static import playground_routes

Routes = dict[tuple[str, str], AsgiHandler]  # by method and path


def build_app(service: Service, playground: Mapping[str, tuple[bytes, str]]) -> Starlette:
    """Return the ASGI application of one edge. `playground` holds the bytes and content types of static files."""
    app = Starlette()
    app.router.redirect_slashes = False
    access = service.config.access
    files = playground_routes(playground) if access.playground else {}
    routes = api_routes(service)
    if access.admin_digests:
        operations = Admin(service)
        admin = _admin_routes(operations, AdminPrefixes(service), AdminLora(service))
        admin |= AdminStandby(service).routes() | AdminTrainer(service, operations).routes()
        routes |= {route: AsgiHandler(handler) for route, handler in admin.items()}
    routes |= {("GET", path): AsgiHandler(file) for path, file in files.items()}
    for (method, path), handler in routes.items():
        app.add_route(path, handler, methods=[method])  # type: ignore[arg-type]
    paths = [path for _, path in routes]
    by_method = sorted(ENDPOINTS, key=lambda endpoint: endpoint.method == "POST")  # two APIs have the path /
    writers = {path: endpoint.write_error for endpoint in by_method for path in endpoint.paths}
    app.add_exception_handler(HTTPException, _http_errors(list(routes), writers))
    app.add_middleware(PathAliases, paths=paths)
    public = [path.encode() for path in files]
    app.add_middleware(
        Guard,
        config=service.config,
        keys=service.keys,
        limits=service.limits,
        watch=service.watch,
        public=public,
        error_writers=writers,
    )
    if access.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(access.cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],  # OpenAI's clients send x-stainless-* headers
            expose_headers=["x-request-id", "retry-after", "x-quire-warnings"],
        )
    return app


def api_routes(service: Service) -> Routes:
    """Return the handlers of all API endpoints, without admin routes and the playground."""
    service.watch.fields = frozenset(field.name for endpoint in ENDPOINTS for field in endpoint.fields)
    routes: Routes = {}
    for endpoint in ENDPOINTS:
        handler = AsgiHandler(endpoint.make_handler(service), endpoint.write_error)
        routes |= {(endpoint.method, path): handler for path in endpoint.paths}
    return routes


def _admin_routes(admin: Admin, prefixes: AdminPrefixes, lora: AdminLora) -> dict[tuple[str, str], Handler]:
    return {
        ("POST", "/admin/drain"): admin.drain,
        ("POST", "/admin/abort"): admin.abort,
        ("POST", "/admin/reset_cache"): admin.reset_cache,
        ("POST", "/admin/prefixes"): prefixes.register,
        ("GET", "/admin/prefixes"): prefixes.listing,
        ("DELETE", "/admin/prefixes/{name:path}"): prefixes.remove,
        ("GET", "/admin/stats"): admin.stats,
        ("GET", "/admin/requests"): admin.requests,
        ("GET", "/admin/blocks"): admin.blocks,
        ("POST", LOAD_PATH): lora.load,
        ("POST", UNLOAD_PATH): lora.unload,
    }


def _http_errors(
    routes: Sequence[tuple[str, str]], writers: Mapping[str, Callable[[ApiError], bytes]]
) -> Callable[[Request, Any], Awaitable[Response]]:
    async def answer(request: Request, error: Any) -> Response:
        """Answer a request that the router refused, with an error in the shape of the path's API, else in OpenAI's."""
        path = request.scope["path"]
        write_error = writers.get(path, write_ollama_error if is_ollama(path) else ApiError.body)
        headers = dict(error.headers or {})
        if error.status_code == 405:
            methods = [method for method, route in routes if route == path] or [headers.get("Allow", "another method")]
            headers["Allow"] = ", ".join(methods)
            message = f"this path takes {' and '.join(methods)}, not {request.method}"
            refusal = ApiError(405, message, code="method_not_allowed")
        else:
            refusal = path_not_found(path, [route for _, route in routes])
        return Response(write_error(refusal), refusal.status, headers, "application/json")

    return answer
