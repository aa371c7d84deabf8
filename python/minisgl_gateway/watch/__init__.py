"""What an operator watches: the X-ray, records, traces, profiles, energy."""
