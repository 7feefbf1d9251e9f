"""Drafters compared on live traffic: who gets which, what is concluded, and what happens then."""
