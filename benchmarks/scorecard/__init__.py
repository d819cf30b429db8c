"""The scorecard: proxies that people use, held to the profile of what they themselves speak."""
