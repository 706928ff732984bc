"""Reports: the ledger before a run, comparisons of finished ones. Reads runs with neither torch nor Lightning.

The ledger, what a run will keep and move: ``ledger*.py``. The comparison, in the order in which it is made:

====================  ======================================================================================
``reading.py``        a run folder, in whatever state it is, as a ``Run`` with notes on what is odd
``grouping.py``       runs of one configuration and several seeds; which group is the baseline
``measures.py``       time to target, hardware, which way a metric gets better
``evidence.py``       spread over seeds, the band, values at equal places: nothing is interpolated
``verdict.py``        what the evidence bears out, in words
``comparison.py``     all of it together
``tables.py``         the comparison for the terminal, Markdown and CSV
``charts.py``         what the figures show; ``svg.py`` and ``png.py`` draw it
``page.py``           one HTML page that needs nothing else; ``style.py`` is its style sheet
``output.py``         all of it in one folder
``wandb_import.py``   an offline W&B run as a run folder; ``wandb_log.py`` reads its log
====================  ======================================================================================
"""
