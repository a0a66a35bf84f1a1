"""What happened: metrics, traces, log lines and KV events."""
