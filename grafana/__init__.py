"""Dashboards for Grafana, made by a program, with its provisioning. Not part of the package kvctl."""
