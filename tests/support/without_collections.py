"""Imported first by the process that ranks are forked from: a fifth of its imports' time is the collector's."""

import gc

gc.disable()  # each rank enables it
