"""hvrun: one command line becomes one MPI job with a supervisor for each rank.

Nothing here imports MPI, a framework, or hvlite outside this package. Imports go
downward only:

    cli  doctor            what the user types and reads
    job                    the running job: the one clock and event loop of hvrun
    channel  output        bytes from and to the supervisors; what is shown of them
    course  verdict        how a job goes and ends, who failed first (pure)
    rank  child            the supervisor, a process of its own in each rank
    mpirun  environment    which mpirun, its arguments, the ranks' variables
    libmpi  lines  screen  records  wire  stdin  processes  leftovers  hosts
    spec  errors
"""
