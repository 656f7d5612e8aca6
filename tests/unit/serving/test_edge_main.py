"""The edge process."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.architecture.source import SOURCE


def test_the_edge_never_imports_torch() -> None:
    program = (
        f"import json, sys; sys.path.insert(0, {str(SOURCE)!r}); import quire.serving.edge; "
        "print(json.dumps(list(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "huggingface_hub"} & set(json.loads(done.stdout))
