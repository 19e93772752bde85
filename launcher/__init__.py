"""hvrun: one command line becomes one MPI job with a supervisor for each rank.

Layers, downward only; nothing here imports MPI, a framework, or hvlite outside
this package:

    cli  doctor                 what the user types and reads
    job                         the running job: signals, records, the end
    screen  verdict  rank       what is shown; who failed first; the supervisor
    mpirun  environment         which mpirun, its arguments, the ranks' variables
    libmpi  lines  wire  processes  hosts  spec  errors
"""
