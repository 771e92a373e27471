"""`jaxret serve`: runs behind HTTP.

`device.py` has the thread that computes, `served.py` a served run, `gateway.py` the checks of every request (token,
limits, times, log, counts), `routes.py` the interfaces, and `server.py` the process.
"""
