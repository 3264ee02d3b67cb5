"""Between the core and the outside: scraper, card poller, tick loop, gatekeeper, decision log."""
