"""The core's families: functions from config.json to a `ModelSpec`. Read next: `dense`."""
