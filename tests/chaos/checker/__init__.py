"""The independent checker: what the ledger, its audit and the output files must agree on, whatever happened.

Plain data in, objections out; nothing of the engine is imported. An objection is a sentence; none means that every row
is there once, in order, from a current attempt under a current epoch, and that nobody claimed otherwise.
"""
