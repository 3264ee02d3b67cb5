"""The scraper, the tick loop, and the composition of the core with the outside."""
