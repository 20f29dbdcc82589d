"""Forecasts for models that are divided over several devices."""
