"""`jaxret serve`: runs behind HTTP.

`device.py` has the one thread that computes, `served.py` a run as it is served, `gateway.py` what every request passes
(token, limits, times, log, counts), `routes.py` the interfaces, and `server.py` the process.
"""
