"""A Sphinx extension: what a cell prints stays in whole lines on the page.

A kernel sends its output in pieces, which may end in the middle of a line. nbclient joins them if
it is told to, and jupyter-cache, which runs the notebooks, has no setting that tells it.
"""

from functools import partial

from jupyter_cache.executors import utils


def setup(app):
    utils.executenb = partial(utils.executenb, coalesce_streams=True)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
