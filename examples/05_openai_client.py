"""Stream a chat reply through the `openai` package from llama-dflash's server.

python examples/05_openai_client.py [TARGET.gguf DRAFT.gguf]
python examples/05_openai_client.py --url http://127.0.0.1:8080     (of `llama-dflash serve`; nothing is started)

The reply goes to stdout, mode and counts to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

import llama_dflash
from llama_dflash import builds
from llama_dflash.server import Server
from llama_dflash.spec import RunConfig

try:
    from openai import OpenAI
except ImportError:
    sys.exit("this example needs the package openai: pip install openai")

MODELS = Path(llama_dflash.__file__).parent / "models"  # a tiny trained pair; it knows code, not how to chat
QUESTION = "Write a function that reverses a list."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", type=Path, default=MODELS / "tiny-target.gguf")
    parser.add_argument("draft", nargs="?", type=Path, default=MODELS / "tiny-draft.gguf")
    parser.add_argument("--url", help="of a server that runs")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        url = args.url
        if url is None:
            config = RunConfig(args.target, args.draft, budget=15).checked()
            server = stack.enter_context(Server(builds.resolve(builds.INSTALLED), config, extra=["-c", "2048"]))
            print(f"[{server.client.effective_mode()['str']}]", file=sys.stderr)
            url = server.client.url
        # The package wants a key; the server does not, unless it was started with --api-key.
        client = stack.enter_context(OpenAI(base_url=f"{url}/v1", api_key="none"))
        chunks = client.chat.completions.create(
            model="any", messages=[{"role": "user", "content": QUESTION}], max_tokens=64, temperature=0, stream=True
        )
        for chunk in chunks:
            print("".join(choice.delta.content or "" for choice in chunk.choices), end="", flush=True)
            # llama.cpp's own field, in the last chunk.
            timings = getattr(chunk, "timings", None)
            if timings and "rounds" in timings:
                print(f"\n[{timings['predicted_n']} tokens in {timings['rounds']} rounds]", file=sys.stderr)
        print()


if __name__ == "__main__":
    main()
