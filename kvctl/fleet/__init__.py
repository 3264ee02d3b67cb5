"""What other people's load balancers ask of kvctl, in their own wire forms: how much room this box has."""
