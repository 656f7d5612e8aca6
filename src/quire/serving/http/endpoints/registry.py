"""All endpoints of the public API. A new endpoint is one file and one line here."""

from __future__ import annotations

from quire.serving.http.endpoint import Endpoint
from quire.serving.http.endpoints.anthropic import ANTHROPIC
from quire.serving.http.endpoints.batches import batch_endpoints
from quire.serving.http.endpoints.chat import CHAT
from quire.serving.http.endpoints.completions import COMPLETIONS
from quire.serving.http.endpoints.documents import document_pages
from quire.serving.http.endpoints.files import FILES
from quire.serving.http.endpoints.fork import FORK
from quire.serving.http.endpoints.ollama import OLLAMA, ROOT
from quire.serving.http.endpoints.pages import PAGES
from quire.serving.http.endpoints.responses.endpoint import RESPONSES
from quire.serving.http.endpoints.tokenize import DETOKENIZE, TOKENIZE

_DESCRIBED: tuple[Endpoint, ...] = (
    CHAT,
    COMPLETIONS,
    *RESPONSES,
    FORK,
    TOKENIZE,
    DETOKENIZE,
    *ANTHROPIC,
    *OLLAMA,
    *FILES,
    *batch_endpoints((CHAT, COMPLETIONS)),
    *PAGES,
)
ENDPOINTS: tuple[Endpoint, ...] = (*_DESCRIBED, *document_pages(_DESCRIBED), ROOT)
BY_NAME: dict[str, Endpoint] = {endpoint.name: endpoint for endpoint in ENDPOINTS}
