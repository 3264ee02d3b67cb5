"""Settings: a pydantic-settings model, which ``loading.load`` reads from every place that may have a value.

``usual`` and ``units`` are standard library only: ``kvctl status`` must not wait for pydantic, so nothing is
imported here.
"""
