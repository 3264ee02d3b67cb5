"""What on-call sees and moves: the admin API on a unix socket, its audit log and client; the metrics port."""
