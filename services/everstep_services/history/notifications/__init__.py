"""Messages to people when something needs them: webhook, Slack, PagerDuty, Alertmanager."""
