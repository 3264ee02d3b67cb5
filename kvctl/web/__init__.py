"""The status page on the admin listener: one static page and the live data behind it. Read only."""
