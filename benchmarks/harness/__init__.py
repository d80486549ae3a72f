"""What every benchmark shares: engines on pinned cores, a streaming client, statistics, prompts and
reports.

Run a benchmark as a file (``python benchmarks/handover.py``) and never with the repository root on
``sys.path``: the root has a folder ``kernels``, which transformers would import in place of Hugging
Face's package of that name.
"""
