"""One request, executed: legs, answers, what is given back."""
