"""`minisgl upgrade`: a new server takes over the port of a running one.

::

    minisgl upgrade --asks--> old server --starts--> successor (new code, new flags)
                                  |                      |
      clients <---open answers----+ <------ link ------> +---new connections---> clients
                                  |                      |
                                  +--idle connections--->+

The successor has the old server's listening socket, so no connection is refused. The old server
ends when its requests have.
"""
