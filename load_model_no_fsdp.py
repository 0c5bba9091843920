"""What is the largest model that one device holds without FSDP, or trains?

    python load_model_no_fsdp.py --scaling-strategy all --low 1 --high 40 --mode load

A binary search over the scaling factor that starts from the memory model's prediction and never
trusts it: each probe loads the model, or trains it for two steps, in a fresh process, and is a
``Probe:`` record of the log. Ends with ``Best fit: 19`` and ``Actual model parameters: …``; exit
status 3 when even ``--low`` does not fit.
"""

import sys

from cli import parse_flags, refuse
from distributed import EXIT_STATUS
from search import Search, SearchConfig


def main(config: SearchConfig) -> int:
    """Search (or only print what is predicted); the exit status of how it ended."""
    try:
        search = Search(config)
    except ValueError as error:
        refuse(error)
    if config.dry_run:
        print(search.plan())
        return 0
    return EXIT_STATUS[search.run()]


if __name__ == "__main__":
    sys.exit(main(parse_flags(SearchConfig)))
