"""What happened, for people: state rebuilt from logs, explanations, timelines, reports, metrics."""
