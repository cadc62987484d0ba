"""Schedules: what an order is and when its actions run (`order`), the built-in ones and those of files (`rules`)."""
