"""Reports: comparisons of finished runs. Reads runs with neither torch nor Lightning.

The comparison, in the order in which it is made:

====================  ======================================================================================
``load_runs.py``      a run folder, in whatever state it is, as a ``Run`` (``run.py``) with notes on what is odd; on
                      ``validation.py`` (JSON by type) and ``run_tables.py`` (step rows and metrics)
``groups.py``         runs of one configuration and several seeds; which group is the baseline
``stats.py``          spread over seeds, values at equal places, a finding per candidate
``significance.py``   what the seeds bear out, in words, for every output
``compare.py``        makes a comparison of all that
``tables.py``         the comparison for page, terminal and Markdown; ``comparison_csv.py``
``charts.py``         the figures, declared with Altair; ``theme.py`` their colours
``page.py``           one HTML page that needs nothing else, of ``template/``; all outputs in one folder
``wandb_import.py``   an offline W&B run as a run folder; ``wandb_log.py`` reads its log
====================  ======================================================================================
"""
