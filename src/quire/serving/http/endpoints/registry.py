"""All endpoints of the public API. To add an endpoint, write its file and add it here."""

from __future__ import annotations

from quire.serving.http.endpoint import Endpoint
from quire.serving.http.endpoints.anthropic import ANTHROPIC
from quire.serving.http.endpoints.batches import batch_endpoints
from quire.serving.http.endpoints.chat import CHAT
from quire.serving.http.endpoints.chat_batch import CHAT_BATCH
from quire.serving.http.endpoints.completions import COMPLETIONS
from quire.serving.http.endpoints.documents import document_pages
from quire.serving.http.endpoints.embeddings import EMBEDDINGS
from quire.serving.http.endpoints.files import FILES
from quire.serving.http.endpoints.foreign_embeddings import FOREIGN_EMBEDDINGS
from quire.serving.http.endpoints.fork import FORK
from quire.serving.http.endpoints.generate import GENERATE
from quire.serving.http.endpoints.input_tokens import INPUT_TOKENS
from quire.serving.http.endpoints.invocations import INVOCATIONS
from quire.serving.http.endpoints.llama_cpp import LLAMA_CPP
from quire.serving.http.endpoints.ollama import OLLAMA, ROOT
from quire.serving.http.endpoints.pages import PAGES
from quire.serving.http.endpoints.render import RENDERS
from quire.serving.http.endpoints.responses.endpoint import RESPONSES
from quire.serving.http.endpoints.scoring import SCORING
from quire.serving.http.endpoints.sglang import SGLANG
from quire.serving.http.endpoints.tei import TEI
from quire.serving.http.endpoints.tgi import TGI
from quire.serving.http.endpoints.tokenize import DETOKENIZE, TOKENIZE

_DESCRIBED: tuple[Endpoint, ...] = (
    CHAT,
    COMPLETIONS,
    *RESPONSES,
    CHAT_BATCH,
    GENERATE,
    *RENDERS,
    *INPUT_TOKENS,
    FORK,
    *EMBEDDINGS,
    *SCORING,
    TOKENIZE,
    DETOKENIZE,
    *ANTHROPIC,
    *OLLAMA,
    *LLAMA_CPP,
    *SGLANG,
    *TGI,
    *TEI,
    *FOREIGN_EMBEDDINGS,
    INVOCATIONS,
    *FILES,
    *batch_endpoints((CHAT, COMPLETIONS, RESPONSES[0], GENERATE, EMBEDDINGS[0])),
    *PAGES,
)
ENDPOINTS: tuple[Endpoint, ...] = (*_DESCRIBED, *document_pages(_DESCRIBED), ROOT)
BY_NAME: dict[str, Endpoint] = {endpoint.name: endpoint for endpoint in ENDPOINTS}
