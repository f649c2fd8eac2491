/* The protocol of docs/protocol.md as a program for the model checker Spin. `make model` checks the variants in check.py.
 *
 * World   NP participants, NC checkpoints, three driver incarnations. Driver 0 and 1 race: either may be a zombie, either
 *         may crash at any step. Driver 2 is started when both have ended (a restore: at any time). Tasks outlive drivers.
 * Steps   One d_step is one request to storage, to the external system or to Spark. Between any two of them everybody
 *         else may do anything, so a driver that is never scheduled again is one that died.
 * Checked in every state that can be reached; each assertion carries its name in a comment:
 *         S1 a subtask's rows of a checkpoint become visible at most once, over all lineages
 *         S2 when Spark writes commits/N, every participant of N is visible, and N was made of the very input that
 *            Spark has planned (with S1: exactly once)
 *         S3 only a transaction that a record names becomes visible
 *         S4 at the end all checkpoints are visible once, and no record names a transaction that is still in doubt.
 *            Vacuous where a bound of the model ran out, or an operator was told of a mistake (`told`)
 *         S5 checkpoints become visible in their order, and a staged one as a whole
 *         S6 a sweep aborts nothing of a newer driver, and nothing that was decided before it was listed
 *         S7 no false alarm: a driver finds no gap and no loss behind Spark's back
 */

/* ---- the bounds */
#ifndef NP
#define NP 1          /* participants, 1 or 2 */
#endif
#ifndef NC
#define NC 2          /* checkpoints 1..NC */
#endif
#ifndef NR
#define NR 4          /* decision rounds of a checkpoint: 0 = complete, then replays */
#endif
#ifndef NA
#define NA 1          /* attempts of a task: 2 = a retry or a speculative copy */
#endif
#ifndef LOSS
#define LOSS 1        /* pre-committed transactions that the external system rolls back by itself */
#endif
#ifndef CRASH
#define CRASH 0       /* drivers that may crash anywhere, 0..2. Only S4 needs it: see Steps */
#endif

/* ---- what there is in the world */
#ifndef KAFKA
#define KAFKA 0       /* 1: pooled names; whoever begins under a name fences and aborts its holder */
#endif
#ifndef LSO
#define LSO 0         /* 1: (KAFKA) an outcome can be read only while no transaction of the partition is open */
#endif
#ifndef STAGED
#define STAGED 0      /* 1: the sink finishes a checkpoint as a whole, in one transaction of the external system */
#endif
#ifndef TWOSTEP
#define TWOSTEP 0     /* 1: a commit takes time: the name is gone already, the outcome not yet to be seen */
#endif
#ifndef LOCKS
#define LOCKS 0       /* 1: an open or pre-committed transaction blocks other writers of its participant */
#endif
#ifndef OPENSTEP
#define OPENSTEP 0    /* 1: begin and pre-commit are two steps: a task may be fenced while it writes */
#endif
#ifndef GC
#define GC 0          /* 1: completing N deletes the records of N-1 (sharper than the code, which keeps two) */
#endif
#ifndef LATEPUT
#define LATEPUT 0     /* 1: a put may answer with an error and land later, or never */
#endif
#ifndef SWEEPS
#define SWEEPS 0      /* 1: a driver may sweep before any batch, not only before its first */
#endif
#ifndef FLAKY
#define FLAKY 0       /* 1: a sweep may fail, and is left to the next one */
#endif
#ifndef BACKUP
#define BACKUP 0      /* 1: drivers 1 and 2 may find an older checkpointLocation: the first batches, other input */
#endif
#ifndef RESTORE
#define RESTORE 0     /* 1: driver 1 or 2 may restore the savepoint of checkpoint 1 into a new location and lineage */
#endif

#ifndef SETBACK
#define SETBACK 0     /* a memory becomes an older one before driver 2 starts: 1 storage, 2 checkpointLocation, 4 the external
                         system; sums: any of these */
#endif
#ifndef ASK
#define ASK 0         /* 1: (RESTORE) driver 2 is none, but an operator's command, at any time: asks what became of the newest checkpoint */
#endif

/* ---- the rules: 0 switches one off */
#ifndef R1
#define R1 1          /* after a put and before the first commit: is a newer checkpoint complete? */
#endif
#ifndef R2
#define R2 1          /* lost needs proof of abort; 0: fenced, or "name gone", is taken for lost */
#endif
#ifndef R3
#define R3 1          /* a replay's record is the successor of the round evaluated; 0: the next free number */
#endif
#ifndef R4
#define R4 1          /* names are never used twice; 0: a replay uses the lost transaction's name */
#endif
#ifndef R5
#define R5 1          /* (KAFKA) one epoch per transaction; 0: a producer keeps its epoch */
#endif
#ifndef R6
#define R6 1          /* only the newest generation replays */
#endif
#ifndef R7
#define R7 1          /* (LSO) sweep while asking for outcomes; 0: wait */
#endif
#ifndef R8
#define R8 1          /* (LOCKS) a blocked task ends and the driver sweeps; 0: wait */
#endif
#ifndef R9
#define R9 1          /* after a load: still the newest? else read again */
#endif
#ifndef R9GAP
#define R9GAP 1       /* Spark is ahead of what was loaded: read again before calling it a gap */
#endif
#ifndef R9LOST
#define R9LOST 1      /* Spark is past a checkpoint that was seen lost: read again before calling it lost */
#endif
#ifndef R12
#define R12 1         /* a batch counts as done only with the offsets of its record */
#endif
#ifndef HELD
#define HELD 1        /* (STAGED) siblings of a lost participant wait for its replay; 0: they are committed */
#endif
#ifndef LISTFIRST
#define LISTFIRST 1   /* a sweep lists, then reads generation and records; 0: reads first */
#endif
#ifndef BASEFIRST
#define BASEFIRST 1   /* (RESTORE) base record, then claim of the lineage; 0: the other way round */
#endif
#ifndef FENCE
#define FENCE 1       /* (RESTORE) claims a generation before it looks for later checkpoints; 0: looks, then claims */
#endif
#ifndef R14
#define R14 1         /* after a put and before the first commit: is one's generation still the newest? */
#endif
#ifndef R14LOAD
#define R14LOAD 1     /* the same after a load */
#endif
#ifndef ASKCLAIM
#define ASKCLAIM 1    /* (ASK) whoever asks amid a restore claims a generation first */
#endif
#ifndef R15
#define R15 1         /* (SETBACK) a start compares what storage and the external system have committed */
#endif
#ifndef R16
#define R16 1         /* what any retained record names is not aborted; (SETBACK) a start commits it. 0: the newest's only */
#endif
#ifndef ENDLESS
#define ENDLESS 1     /* 0: running out of rounds is an error (no run may need more than NR) */
#endif

#define ND 3
#define NL (1 + RESTORE)               /* lineages */
#define NLOC (1 + RESTORE + BACKUP)     /* checkpointLocations of Spark */
#define NSLOT (ND*NC*NR*NP*NA)         /* transactions: 12, 18, 24, 36, 48, 54, 60, 72, 96 or 108 */
#define SLOT(d,c,r,p,a) (((((d)*NC+(c))*NR+(r))*NP+(p))*NA+(a))   /* c, here and below: checkpoint-1 */
#define S_A(s) ((s)%NA)
#define S_P(s) (((s)/NA)%NP)
#define S_R(s) (((s)/(NA*NP))%NR)
#define S_C(s) (((s)/(NA*NP*NR))%NC)
#define S_D(s) ((s)/(NA*NP*NR*NC))
#define S_L(s) lineage[S_D(s)]
#define CK(l,c) ((l)*NC+(c))           /* a checkpoint of a lineage, or of a location */
#define RK(l,c,r) (CK(l,c)*NR+(r))     /* a record */
#define RP(l,c,r,p) (RK(l,c,r)*NP+(p)) /* what it names for participant p */
#define VK(c,p) ((c)*NP+(p))
#define REF(d,a) (1+(d)*NA+(a))
#define RD(ref) (((ref)-1)/NA)
#define RA(ref) (((ref)-1)%NA)
#define NAMED(s) (put[RK(S_L(s),S_C(s),S_R(s))] && rec[RP(S_L(s),S_C(s),S_R(s),S_P(s))] == REF(S_D(s),S_A(s)))
#define HOLDER (KAFKA && (!R2 || LSO || !R5))   /* variants that ask who holds a pooled name */

/* one guard per transaction */
#define T6(M,i) M((i)) M((i)+1) M((i)+2) M((i)+3) M((i)+4) M((i)+5)
#define T12(M,i) T6(M,(i)) T6(M,(i)+6)
#define T36(M,i) T12(M,(i)) T12(M,(i)+12) T12(M,(i)+24)
#if NSLOT == 12
#define EACH(M) T12(M,0)
#elif NSLOT == 18
#define EACH(M) T12(M,0) T6(M,12)
#elif NSLOT == 24
#define EACH(M) T12(M,0) T12(M,12)
#elif NSLOT == 36
#define EACH(M) T36(M,0)
#elif NSLOT == 48
#define EACH(M) T36(M,0) T12(M,36)
#elif NSLOT == 54
#define EACH(M) T36(M,0) T12(M,36) T6(M,48)
#elif NSLOT == 60
#define EACH(M) T36(M,0) T12(M,36) T12(M,48)
#elif NSLOT == 72
#define EACH(M) T36(M,0) T36(M,36)
#elif NSLOT == 96
#define EACH(M) T36(M,0) T36(M,36) T12(M,72) T12(M,84)
#elif NSLOT == 108
#define EACH(M) T36(M,0) T36(M,36) T36(M,72)
#endif

/* states of a transaction */
#define NONE 0
#define LAUN 1   /* its task has started */
#define OPEN 2
#define PREP 3   /* pre-committed */
#define CMTG 4   /* (TWOSTEP) being committed */
#define COMM 5
#define ABRT 6
#if KAFKA
#define INDOUBT(s) (st[s]==PREP || st[s]==OPEN)        /* a broker cannot tell these apart */
#else
#define INDOUBT(s) (st[s]==PREP)
#endif
/* outcomes, as a driver understands them */
#define UNK  0
#define OK   1
#define LOST 2
#define HOLD 3   /* (STAGED) intact, waits for a lost sibling */

/* ---- external system */
byte st[NSLOT];
byte marked[NSLOT];          /* bit d: driver d's sweep has it on its list */
byte opn[NP];                /* transactions of a participant that are open or in doubt */
byte vis[NC*NP];             /* how often visible */
byte nloss, nspec;
#if HOLDER
byte cur[NP*NA];             /* 1+slot of the holder of a pooled name */
#endif
/* ---- checkpoint storage */
byte gen;                    /* newest generation */
byte lin;                    /* the lineage that its claim names */
bool fence;                  /* a restore has claimed it */
bool put[NL*NC*NR];          /* the record is there */
byte rec[NL*NC*NR*NP];       /* what it names: REF(driver, attempt), 0 = nothing */
byte recoffs[NL*NC];         /* the offsets in the complete record */
/* ---- Spark */
bool commits[NLOC*NC];
byte offs[NLOC*NC];          /* the offset log: 0 = not planned, else which input */
/* ---- drivers */
byte alive[ND];              /* 0 not started, 1 running, 2 ended */
byte loc[ND];                /* its checkpointLocation */
byte lineage[ND];
byte generation[ND];
bool waiting[ND];            /* for acks of checkpoint dn, round dr */
byte dn[ND];
byte dr[ND];
byte win[ND*NP];             /* 1 + attempt of the first ack */
bool exhausted, told;
#if SETBACK
bool back;                   /* a memory was set back */
#endif
hidden byte z, y, x, w, v;   /* scratch, only inside one d_step */
#if RESTORE
#define ALLDONE commits[CK(lin,NC-1)]
#elif BACKUP
#define ALLDONE (commits[CK(0,NC-1)] || commits[CK(1,NC-1)])
#else
#define ALLDONE commits[NC-1]
#endif

inline visible(s) {
    assert(put[RK(S_L(s),S_C(s),S_R(s))] || GC);                                    /* S3 */
    assert(rec[RP(S_L(s),S_C(s),S_R(s),S_P(s))] == REF(S_D(s),S_A(s)));             /* S3 */
    assert(vis[VK(S_C(s),S_P(s))] == 0);                                     /* S1 */
    assert(S_C(s) == NC-1 || vis[VK(S_C(s)+1,S_P(s))] == 0);                 /* S5 */
    vis[VK(S_C(s),S_P(s))]++;
    printf("EV   VISIBLE: transaction of driver%d, checkpoint %d p%d round %d attempt %d\n", S_D(s), S_C(s)+1, S_P(s), S_R(s), S_A(s));
    st[s] = COMM; opn[S_P(s)]--
}
inline rollback(s) {
    printf("EV   ROLLED BACK: transaction of driver%d, checkpoint %d p%d round %d attempt %d\n", S_D(s), S_C(s)+1, S_P(s), S_R(s), S_A(s));
    st[s] = ABRT; opn[S_P(s)]--
}

/* ------------------------------------------------------------------ tasks, and the external system's own will */
inline begin(s) {
#if KAFKA
    z = 0;                                             /* init_transactions fences and aborts the name's holder */
    do
    :: z < NSLOT -> if :: z != s && S_P(z)==S_P(s) && S_A(z)==S_A(s) && (st[z]==OPEN || st[z]==PREP) -> rollback(z)
                       :: else fi; z++
    :: else -> break
    od;
#endif
#if HOLDER
    cur[S_P(s)*NA+S_A(s)] = 1+s;
#endif
    st[s] = OPEN; opn[S_P(s)]++
}
inline precommit(s) {
    printf("EV   task of driver%d pre-commits checkpoint %d p%d round %d attempt %d\n", S_D(s), S_C(s)+1, S_P(s), S_R(s), S_A(s));
    st[s] = PREP;
    v = S_D(s);
    if
    :: alive[v]==1 && waiting[v] && dn[v]==S_C(s)+1 && dr[v]==S_R(s) && win[v*NP+S_P(s)]==0 -> win[v*NP+S_P(s)] = 1+S_A(s)
    :: else                                            /* a loser, or nobody listens: an orphan */
    fi
}
#if LOCKS
#define FREE(s) && (opn[S_P(s)]==0 || st[s]==OPEN)
#else
#define FREE(s)
#endif
#if OPENSTEP && KAFKA
#define MAYLOSE(s) (st[s]==PREP || st[s]==OPEN)
#else
#define MAYLOSE(s) (st[s]==PREP)
#endif
#if NA > 1                                             /* the ack of an executor that dies is lost, if another attempt runs */
#define OTHER(s) (st[(s)+1-2*S_A(s)]==LAUN || st[(s)+1-2*S_A(s)]==OPEN)
#else
#define OTHER(s) false
#endif
#define O_BEGIN(i) :: (st[i]==LAUN FREE(i)) -> sel = i
#define O_WRITE(i) :: (st[i]==OPEN) -> sel = i
#define O_LOSE(i)  :: (nloss < LOSS && MAYLOSE(i)) -> sel = i
#define O_CMTG(i)  :: (st[i]==CMTG) -> sel = i

active proctype World() {
    byte sel;
    do
    :: atomic { if EACH(O_BEGIN) fi;
#if OPENSTEP
                d_step { begin(sel); sel = 0 } }
    :: atomic { if EACH(O_WRITE) fi;
#else
                d_step { begin(sel) };
#endif
                if
                :: d_step { true -> precommit(sel); sel = 0 }
                :: d_step { OTHER(sel) -> st[sel] = PREP; sel = 0 }
                fi }
#if LOSS
    :: atomic { if EACH(O_LOSE) fi; d_step { nloss++; rollback(sel); sel = 0 } }
#endif
#if TWOSTEP
    :: atomic { if EACH(O_CMTG) fi; d_step { visible(sel); sel = 0 } }
#endif
    od; true
}

/* ------------------------------------------------------------------ a driver incarnation */
#define ALIVE (alive[d]==1)
#define L lineage[d]
#define CN (N-1)
#define KS(c,q) SLOT(RD(kf[q]),(c)-1,kr[q],q,RA(kf[q]))    /* the transaction known as committable of participant q */
#define SAME (BACKUP + RESTORE == 0 || recoffs[CK(L,CN)] == offs[CK(loc[d],CN)])

inline newest(u) { u = NC; do :: u > 0 && !put[RK(L,u-1,0)] -> u-- :: else -> break od; true }
inline sparkstart() {        /* the first batch that is not in commits; its offsets are planned, or planned now */
    N = 1; do :: N <= NC && commits[CK(loc[d],N-1)] -> N++ :: else -> break od;
    if :: N <= NC && offs[CK(loc[d],N-1)]==0 -> offs[CK(loc[d],N-1)] = 1+loc[d] :: else fi
}
inline know(c, rr) {         /* take record (c,rr) into what this driver knows */
    z = 0;
    do
    :: z < NP ->
        if
        :: rec[RP(L,(c)-1,rr,z)] != 0 -> kr[z] = rr; kf[z] = rec[RP(L,(c)-1,rr,z)]; out[z] = UNK
        :: out[z] == HOLD -> out[z] = UNK              /* the lost sibling has its replacement */
        :: else
        fi; z++
    :: else -> break
    od; true
}
inline forget() { z = 0; do :: z < NP -> kr[z] = 0; kf[z] = 0; out[z] = UNK; z++ :: else -> break od; true }
inline anylost() { t = false; z = 0; do :: z < NP -> if :: kf[z]!=0 && out[z]!=OK -> t = true :: else fi; z++ :: else -> break od; true }

#if HOLDER
#define FENCED(c,q) (cur[q*NA+RA(kf[q])] != 1+KS(c,q))
#else
#define FENCED(c,q) false
#endif
inline trycommit(c, q) {     /* commit(committable of participant q), and the external system's answer */
#if KAFKA && !R5
    y = cur[q*NA+RA(kf[q])]-1;                         /* same producer id and epoch: it hits whatever is open now */
    if :: st[y]==OPEN || st[y]==PREP -> visible(y) :: else fi;
#endif
#if !R4
    x = 0;                                             /* a commit by a name that another round also uses */
    do
    :: x < NR -> y = SLOT(RD(kf[q]),(c)-1,x,q,RA(kf[q])); if :: st[y]==PREP -> visible(y) :: else fi; x++
    :: else -> break
    od;
#endif
    y = KS(c,q);
    printf("EV driver%d asks to commit checkpoint %d p%d round %d of driver%d; it is in state %d\n", d, c, q, kr[q], S_D(y), st[y]);
    if
    :: st[y]==PREP ->
#if TWOSTEP
        st[y] = CMTG
#else
        visible(y); out[q] = OK
#endif
    :: st[y]==COMM -> if :: KAFKA && !R2 && FENCED(c,q) -> out[q] = LOST :: else -> out[q] = OK fi
    :: st[y]==ABRT -> out[q] = LOST
    :: st[y]==CMTG -> out[q] = LOST                    /* only reached without R2 */
    :: else -> assert(false)
    fi
}
#if TWOSTEP && R2
#define TELLS(c) (st[KS(c,p)] != CMTG)
#elif KAFKA && LSO
#define TELLS(c) (st[KS(c,p)]==PREP || !FENCED(c,p) || opn[p]==0)
#else
#define TELLS(c) true
#endif
#if STAGED
inline commitall(c) {        /* commit_all: one transaction moves all participants, or holds those whose sibling is lost */
    d_step { ALIVE ->
        t = false; z = 0;
        do
        :: z < NP -> if :: kf[z]!=0 && (out[z]==LOST || st[KS(c,z)]==ABRT) -> out[z] = LOST; t = HELD :: else fi; z++
        :: else -> break
        od;
        z = 0;
        do
        :: z < NP -> if :: kf[z]!=0 && out[z]==UNK && t -> out[z] = (st[KS(c,z)]==COMM -> OK : HOLD)
                        :: kf[z]!=0 && out[z]==UNK && !t -> trycommit(c, z)
                        :: else fi; z++
        :: else -> break
        od;
        z = 1; do :: z < NP -> assert(vis[VK((c)-1,z)] == vis[VK((c)-1,0)]);    /* S5 */
                               z++ :: else -> break od;
        t = false }
}
#else
inline commitall(c) {        /* commit all that is known of checkpoint c; leaves no outcome unknown */
    p = 0;
    do
    :: p < NP && (kf[p]==0 || out[p]!=UNK) -> p++
    :: d_step { p < NP && kf[p]!=0 && out[p]==UNK && ALIVE && TELLS(c) -> trycommit(c, p) }
#if LSO && R7
    :: d_step { p < NP && kf[p]!=0 && out[p]==UNK && ALIVE && !TELLS(c) -> true } -> sweep()
#endif
    :: p == NP -> p = 0; break
    od; true
}
#endif

/* ---- a sweep: list what is in doubt, then read generation and records, then abort what they do not name */
inline list() {
    printf("EV driver%d lists what is in doubt\n", d);
    z = 0; do :: z < NSLOT -> if :: INDOUBT(z) -> marked[z] = marked[z] | (1<<d) :: else fi; z++ :: else -> break od; true
}
inline readnamed() {         /* the retained records; takes what they name off the list */
    newest(w); z = 0;
    do
    :: z < NSLOT ->
        if
        :: w > 0 && S_L(z)==L && (R16 || S_C(z)==w-1) && NAMED(z) -> marked[z] = marked[z] & ~(1<<d)
        :: else
        fi; z++
    :: else -> break
    od; true
}
inline unmark() { z = 0; do :: z < NSLOT -> marked[z] = marked[z] & ~(1<<d); z++ :: else -> break od; true }
inline abortlisted() {
    z = 0;
    do
    :: z < NSLOT ->
        if
        :: marked[z] & (1<<d) ->
            if
            :: INDOUBT(z) -> printf("EV driver%d's sweep aborts\n", d);
                             assert(generation[S_D(z)] <= generation[d]);           /* S6 */
                             rollback(z)
            :: else                                    /* committed or gone meanwhile */
            fi;
            marked[z] = marked[z] & ~(1<<d)
        :: else
        fi; z++
    :: else -> break
    od; true
}
#if LISTFIRST
inline sweep() {
    if
    :: d_step { ALIVE -> list() };
       if :: ALIVE && gen==generation[d] :: ALIVE && gen!=generation[d] -> goto stop fi;
       d_step { ALIVE -> readnamed() };
       d_step { ALIVE -> abortlisted() }
    :: FLAKY
    fi
}
#else
inline sweep() {             /* the generation is read first, or the records */
    if
    :: ALIVE && gen==generation[d] -> d_step { ALIVE -> list(); readnamed(); true }
    :: d_step { ALIVE -> z = 0; do :: z < NSLOT -> marked[z] = marked[z] | (1<<d); z++ :: else -> break od; readnamed(); true };
       d_step { ALIVE && gen==generation[d] -> z = 0;
                do
                :: z < NSLOT -> assert(!(marked[z] & (1<<d) && INDOUBT(z) && NAMED(z) && S_L(z)==L));   /* S6 */
                                if :: !INDOUBT(z) -> marked[z] = marked[z] & ~(1<<d) :: else fi; z++
                :: else -> break
                od; true }
    :: ALIVE && gen!=generation[d] -> goto stop
    fi;
    d_step { ALIVE -> abortlisted() }
}
#endif
inline abortown(rr, keep) {  /* abort own acks of (N,rr); keep: but for those that the record there names */
    p = 0;
    do
    :: d_step { p < NP && ALIVE ->
        if :: win[d*NP+p] != 0 && !(keep && rec[RP(L,CN,rr,p)]==REF(d,win[d*NP+p]-1)) ->
              y = SLOT(d,CN,rr,p,win[d*NP+p]-1); if :: st[y]==PREP -> rollback(y) :: else fi
           :: else fi;
        p++ }
    :: p == NP -> p = 0; break
    od; true
}
inline launch(rr, need) {    /* run the batch, writing the participants p for which `need` holds */
    d_step { ALIVE ->
        p = 0;
        do
        :: p < NP -> win[d*NP+p] = 0; if :: need -> st[SLOT(d,CN,rr,p,0)] = LAUN :: else fi; p++
        :: else -> break
        od;
        p = 0; waiting[d] = true; dn[d] = N; dr[d] = rr; printf("EV driver%d starts tasks of checkpoint %d round %d\n", d, N, rr) }
}
inline doput(rr) {
    printf("EV driver%d PUTS the record of checkpoint %d round %d\n", d, N, rr);
    put[RK(L,CN,rr)] = true;
    if :: rr == 0 -> recoffs[CK(L,CN)] = offs[CK(loc[d],CN)] :: else fi;
    z = 0;
    do
    :: z < NP -> rec[RP(L,CN,rr,z)] = (win[d*NP+z]!=0 -> REF(d,win[d*NP+z]-1) : 0);
                 assert(N == 1 || rr > 0 || vis[VK(N-2,z)]==1);                   /* S5: N only when N-1 is visible */
                 z++
    :: else -> break
    od; true
}
/* put-if-absent after a look at the generation, adopting the record that is there; then R1 and R14, for which the code
 * takes one listing: here others may come in between */
inline decide(rr) {
    if
    :: ALIVE && !R6 && rr > 0
    :: d_step { ALIVE && gen==generation[d] -> printf("EV driver%d checks its generation: still the newest\n", d) }
    :: ALIVE && gen!=generation[d] -> abortown(rr, false); goto stop
    fi;
#if LATEPUT
    if
    :: ALIVE
    :: ALIVE && d < ND-1 -> if :: d_step { !put[RK(L,CN,rr)] -> doput(rr) } :: true fi; goto stop   /* aborts nothing: it may land */
    fi;
#endif
    if
    :: d_step { ALIVE && !put[RK(L,CN,rr)] -> doput(rr); know(N, rr) }
    :: ALIVE && put[RK(L,CN,rr)] ->
       if
       :: d_step { ALIVE && put[RK(L,CN,rr)] -> know(N, rr) } -> abortown(rr, true)
       :: ALIVE && !put[RK(L,CN,rr)] -> abortown(rr, false); goto stop               /* GC: so a newer one is complete */
       fi
    fi;
    d_step { ALIVE -> r = rr; C = N; newest(w); t = (R1 && w > N) };
    if :: t -> t = false; abortown(rr, false); goto stop :: else fi;
#if R14 && R6
    if :: ALIVE && gen==generation[d] :: ALIVE && gen!=generation[d] -> goto stop fi
#endif
}
#define ACKED(rr,q) (win[d*NP+q]!=0 || st[SLOT(d,CN,rr,q,0)]==NONE)
#if NA > 1
#define GONE(rr,q) (win[d*NP+q]==0 && st[SLOT(d,CN,rr,q,0)]==ABRT && st[SLOT(d,CN,rr,q,1)]==ABRT)
#define STUCK(rr,q) (win[d*NP+q]==0 && opn[q]>0 && (st[SLOT(d,CN,rr,q,0)]==LAUN || st[SLOT(d,CN,rr,q,1)]==LAUN))
#else
#define GONE(rr,q) (win[d*NP+q]==0 && st[SLOT(d,CN,rr,q,0)]==ABRT)
#define STUCK(rr,q) (win[d*NP+q]==0 && opn[q]>0 && st[SLOT(d,CN,rr,q,0)]==LAUN)
#endif
#if NP == 1
#define ALLACKED(rr) ACKED(rr,0)
#define ANYGONE(rr) GONE(rr,0)
#define ANYSTUCK(rr) STUCK(rr,0)
#else
#define ALLACKED(rr) (ACKED(rr,0) && ACKED(rr,1))
#define ANYGONE(rr) (GONE(rr,0) || GONE(rr,1))
#define ANYSTUCK(rr) (STUCK(rr,0) || STUCK(rr,1))
#endif
#define NEXTROUND (C > 0 && r+1 < NR && put[RK(L,C-1,r+1)])

#define BASE d_step { ALIVE -> put[RK(1,0,0)] = true; recoffs[CK(1,0)] = recoffs[CK(0,0)]; printf("EV driver%d puts the base record\n", d) }

#if SETBACK
inline remembered(u) {       /* the newest checkpoint of which the external system has rows */
    u = NC;
    do
    :: u > 0 && vis[VK(u-1,0)]==0 && vis[VK(u-1,NP-1)]==0 -> u--
    :: else -> break
    od; true
}
#define OLDER(z) (S_L(z)==L && S_C(z)+1 < C && NAMED(z))   /* what a record before the newest names */
#define REPLACED(z) (S_R(z)+1 < NR && put[RK(S_L(z),S_C(z),S_R(z)+1)] && rec[RP(S_L(z),S_C(z),S_R(z)+1,S_P(z))] != 0)
inline anygone() {           /* of that: what is neither committed nor in doubt, though Spark was told that it is visible */
    t = false; z = 0;
    do :: z < NSLOT -> if :: OLDER(z) && !REPLACED(z) && st[z]==ABRT -> t = true :: else fi; z++ :: else -> break od; true
}
inline commitolder() {       /* oldest first: slots of one driver are in this order, and no two drivers' mix here */
    x = 0;
    do
    :: x < NC ->
        z = 0;
        do :: z < NSLOT -> if :: S_C(z)==x && OLDER(z) && st[z]==PREP -> visible(z) :: else fi; z++ :: else -> break od;
        x++
    :: else -> break
    od; true
}
/* older memories, from checkpoint k+1 on */
inline backstorage(k) {
    z = 0; do :: z < NC*NR -> if :: z/NR >= (k) -> put[z] = false :: else fi; z++ :: else -> break od; true
}
inline backlocation(k) {
    z = k; do :: z < NC -> commits[z] = false; offs[z] = 0; z++ :: else -> break od; true
}
inline backsystem(k, doubt) {    /* with `doubt` to between pre-commit and commit of checkpoint k+1, else to before it */
    z = 0;
    do
    :: z < NSLOT && S_C(z) >= (k) ->
        if
        :: st[z]==COMM -> vis[VK(S_C(z),S_P(z))] = 0;
                          if :: S_C(z)==(k) && doubt -> st[z] = PREP; opn[S_P(z)]++ :: else -> st[z] = ABRT fi
        :: st[z]==PREP && !(S_C(z)==(k) && doubt) -> rollback(z)
        :: else
        fi; z++
    :: z < NSLOT && S_C(z) < (k) -> z++
    :: else -> break
    od; true
}
#endif
#define DRIVES 0
#define RESTORES 1
#define ASKS 2
proctype Driver(byte d; byte role) {
    byte N, C, r, p, q;       /* r: newest decision round of C that this driver has evaluated */
    byte kr[NP], kf[NP], out[NP];
    bool t, swept, again;
#if SETBACK
    byte e;
#endif
  {
#if RESTORE                   /* ---- the savepoint of checkpoint 1 becomes the base of a new lineage: names nothing, all is visible */
    true;
restore: true;
    if
    :: role == RESTORES && lin == 0 && ALIVE ->
#if FENCE
        d_step { ALIVE -> gen++; fence = true; q = gen; printf("EV driver%d claims generation %d to restore\n", d, gen) };
        if :: ALIVE && put[RK(0,1,0)] -> told = true; goto stop :: ALIVE && !put[RK(0,1,0)] fi;
#else
        if :: ALIVE && put[RK(0,1,0)] -> told = true; goto stop :: ALIVE && !put[RK(0,1,0)] fi;
        d_step { ALIVE -> gen++; fence = true; q = gen; printf("EV driver%d claims generation %d to restore\n", d, gen) };
#endif
#if BASEFIRST
        BASE;
#endif
        if
        :: d_step { ALIVE && gen == q -> gen++; fence = true; lin = 1; q = 0; printf("EV driver%d claims generation %d for the new lineage\n", d, gen) };
        :: d_step { ALIVE && gen != q -> q = 0 };                    /* a driver has started since: look again */
           if :: gen < 2*ND -> goto restore :: else -> exhausted = true; goto stop fi
        fi;
#if !BASEFIRST
        BASE;
#endif
    :: ALIVE && (role != RESTORES || lin == 1)
    fi;
#endif
    /* ---- start. Spark reads its log before recovery (first call) or after it (explicit recover()) */
#if ASK
    if
    :: role == ASKS ->
        d_step { ALIVE -> generation[d] = gen };
        if
        :: d_step { ALIVE && ASKCLAIM && fence -> gen++; fence = false; generation[d] = gen; printf("EV operator claims generation %d\n", gen) }
        :: ALIVE && !(ASKCLAIM && fence)
        fi;
        d_step { ALIVE -> L = lin };
        goto load
    :: else
    fi;
#endif
    if
    :: d_step { ALIVE -> sparkstart(); again = true }        /* the load comes after the call */
    :: ALIVE
    fi;
    d_step { ALIVE -> gen++; fence = false; generation[d] = gen; L = lin; printf("EV driver%d claims generation %d in lineage %d\n", d, gen, lin) };
load: true;
#if SETBACK
    d_step { ALIVE -> remembered(e); true };
#endif
    d_step { ALIVE -> newest(C); printf("EV driver%d loads newest complete %d\n", d, C); r = 0; forget(); if :: C > 0 -> know(C, 0) :: else fi; true };
    do
    :: d_step { ALIVE && NEXTROUND -> r++; know(C, r) }
    :: ALIVE && !NEXTROUND -> break
    od;
    true;
#if R9
    d_step { ALIVE -> newest(w); t = (w != C) };
    if :: t -> t = false; goto load :: else fi;
#endif
#if R14 && R14LOAD
    if :: ALIVE && gen==generation[d] :: ALIVE && gen!=generation[d] -> goto stop fi;
#endif
#if SETBACK
#if R15
    if :: e > C -> assert(back); told = true; goto stop :: else fi;                  /* S7 */
    d_step { ALIVE -> anygone() };
    if :: t -> assert(back); told = true; goto stop :: else fi;                      /* S7 */
    if :: back && N > C+1 -> told = true; goto stop :: else fi;
#endif
#if R16
    d_step { ALIVE -> commitolder() };
#endif
#endif
    if :: C > 0 -> commitall(C) :: else fi;
#if ASK
    if :: role == ASKS -> goto stop :: else fi;
#endif
    true;
    if :: N == 0 -> d_step { ALIVE -> sparkstart() } :: else fi;

call: /* ---- Spark calls foreachBatch(N) */
#if RESTORE
    if :: C > 0 && L != loc[d] -> told = true; goto stop :: else fi;                 /* a record of another query id */
#endif
#if SETBACK
    true;
    d_step { anylost() };
    if :: back && (N > C+1 || (N == C+1 && t)) -> told = true; goto stop :: else -> t = false fi;
#endif
    if :: N > NC -> goto stop :: else fi;
    d_step { anylost() };
    if
    :: !again && (N > C+1 || (N == C+1 && t)) ->       /* what was loaded may be stale */
        t = false; again = true;
        assert(N == C+1 || R9GAP);                     /* S7 */
        assert(N > C+1 || R9LOST);                     /* S7 */
        goto load
    :: else -> assert(!t || N <= C);                   /* S7 */
               assert(N <= C+1);                       /* S7 */
               t = false; again = false
    fi;
    if :: N <= C && R12 && !SAME -> told = true; goto stop :: else fi;
    if
    :: !swept -> swept = true; sweep()
    :: swept && SWEEPS -> sweep()
    :: swept
    fi;
    if
    :: N < C -> goto ret
    :: N == C -> goto decided
    :: N > C
    fi;
write:
    d_step { forget(); true };
    launch(0, true);
    if
    :: d_step { ALIVE && ALLACKED(0) -> waiting[d] = false }
#if OPENSTEP
    :: d_step { ALIVE && ANYGONE(0) -> waiting[d] = false; if :: d==ND-1 -> exhausted = true :: else fi } -> abortown(0, false); goto stop
#endif
#if LOCKS && R8
    :: d_step { ALIVE && ANYSTUCK(0) -> waiting[d] = false;      /* the tasks ran into their lock timeout */
                z = 0; do :: z < NP*NA -> y = SLOT(d,CN,0,z/NA,z%NA); if :: st[y]==LAUN -> st[y] = NONE :: else fi; z++ :: else -> break od; true }
       -> abortown(0, false); swept = false; goto load
#endif
    fi;
    decide(0);
#if GC
    if :: N > 1 -> d_step { ALIVE -> printf("EV driver%d deletes the records of checkpoint %d (retention)\n", d, N-1); z = 0; do :: z < NR -> put[RK(L,N-2,z)] = false; z++ :: else -> break od; true }
       :: else fi;
#endif
    if :: R12 && !SAME -> told = true; goto stop :: else fi;

decided:
    commitall(N);
    d_step { anylost() };
    if :: !t -> goto ret :: else -> t = false fi;

    /* ---- replay what is lost, decide it by the next record */
#if R6
    if :: ALIVE && gen==generation[d] :: ALIVE && gen!=generation[d] -> goto stop fi;
#endif
#if R3
    q = r+1;
#else
    d_step { ALIVE -> q = r+1; do :: q < NR && put[RK(L,CN,q)] -> q++ :: else -> break od; true };
#endif
    if :: q >= NR -> exhausted = true; goto stop :: else fi;
    launch(q, out[p]==LOST);
    do
    :: d_step { ALIVE && ALLACKED(q) -> waiting[d] = false } -> break
#if OPENSTEP
    :: d_step { ALIVE && ANYGONE(q) -> waiting[d] = false; if :: d==ND-1 -> exhausted = true :: else fi } -> abortown(q, false); goto stop
#endif
#if LOCKS && R8
    :: ALIVE && ANYSTUCK(q) -> sweep()
#endif
    od;
    decide(q);
    q = 0;
    goto decided;

ret:  /* ---- foreachBatch returns; Spark writes commits/N, then offsets/N+1 (put-if-absent each, else the query fails) */
    if
    :: ALIVE && commits[CK(loc[d],CN)] -> goto stop
    :: d_step { ALIVE && !commits[CK(loc[d],CN)] ->
           z = 0; do :: z < NP -> assert(vis[VK(CN,z)]==1);                        /* S2 */
                                  z++ :: else -> break od;
           assert(SAME);                                                             /* S2 */
           commits[CK(loc[d],CN)] = true; printf("EV Spark of driver%d writes commits/%d\n", d, N); N++ }
    fi;
    if
    :: N > NC -> goto stop
    :: d_step { ALIVE && N <= NC && offs[CK(loc[d],CN)]==0 -> offs[CK(loc[d],CN)] = 1+loc[d] } -> goto call
    :: ALIVE && N <= NC && offs[CK(loc[d],CN)]!=0 -> goto stop
    fi;
stop: true;
    d_step { alive[d] = 2; printf("EV driver%d ends\n", d) }
  } unless { alive[d]==2 };
    d_step { waiting[d] = false; N = 0; C = 0; r = 0; p = 0; q = 0; t = false; swept = false; again = false; forget(); unmark();
             z = 0; do :: z < NP -> win[d*NP+z] = 0; z++ :: else -> break od; true };
}

/* ------------------------------------------------------------------ operators and crashes, speculation, the last check */
#define FIRST (alive[1]==0)                                        /* driver 0 alive: it is the zombie */
#if SETBACK
#define BACK back
#else
#define BACK false
#endif
#define SECOND (alive[2]==0 && alive[1]==2 && alive[0]==2)
#define START(d,l,role) alive[d] = 1; loc[d] = l; run Driver(d, role)
#if RESTORE
#define HERE lin                                                   /* the location that belongs to the newest lineage */
#define SAVED (lin==0 && commits[CK(0,0)])
#else
#define HERE 0
#endif
#if NA > 1
#define SP(d,p) \
  :: d_step { alive[d]==1 && waiting[d] && win[d*NP+p]==0 && st[SLOT(d,dn[d]-1,dr[d],p,1)]==NONE && \
              ((nspec < 1 && (st[SLOT(d,dn[d]-1,dr[d],p,0)]==LAUN || st[SLOT(d,dn[d]-1,dr[d],p,0)]==OPEN)) \
               || st[SLOT(d,dn[d]-1,dr[d],p,0)]==ABRT) -> \
      if :: st[SLOT(d,dn[d]-1,dr[d],p,0)]!=ABRT -> nspec++ :: else fi; st[SLOT(d,dn[d]-1,dr[d],p,1)] = LAUN }
#endif
init {
    atomic { START(0, 0, DRIVES) };
    do
    :: atomic { FIRST && !ALLDONE -> START(1, HERE, DRIVES) }
#if ASK
    :: atomic { alive[2]==0 -> exhausted = true; START(2, HERE, ASKS) }              /* nobody is left to start */
#else
    :: atomic { SECOND && (!ALLDONE || BACK) -> START(2, HERE, DRIVES) }
#endif
#if SETBACK & 1
    :: d_step { SECOND && commits[0] -> backstorage(1); back = true }
    :: d_step { SECOND && commits[0] -> backstorage(0); back = true }
#endif
#if SETBACK & 2
    :: d_step { SECOND && commits[0] -> backlocation(1); back = true }
    :: d_step { SECOND && commits[0] -> backlocation(0); back = true }
#endif
#if SETBACK & 4
    :: d_step { SECOND && commits[0] -> backsystem(1, true); back = true }
    :: d_step { SECOND && commits[0] -> backsystem(1, false); back = true }
    :: d_step { SECOND && commits[0] -> backsystem(0, true); back = true }
    :: d_step { SECOND && commits[0] -> backsystem(0, false); back = true }
#endif
#if BACKUP
    :: atomic { FIRST && !ALLDONE -> START(1, 1, DRIVES) }
    :: atomic { SECOND && !ALLDONE -> START(2, 1, DRIVES) }
#endif
#if RESTORE
    :: atomic { FIRST && SAVED -> commits[CK(1,0)] = true; offs[CK(1,0)] = 1; START(1, 1, RESTORES) }
#if !ASK
    :: atomic { alive[2]==0 && !FIRST && SAVED -> commits[CK(1,0)] = true; offs[CK(1,0)] = 1; START(2, 1, RESTORES) }
#endif
#endif
#if CRASH
    :: d_step { alive[0]==1 -> alive[0] = 2; exhausted = exhausted || alive[2] }    /* driver 2 runs: nobody may be left to start */
#if CRASH > 1
    :: d_step { alive[1]==1 -> alive[1] = 2; exhausted = exhausted || alive[2] }
#endif
#endif
#if NA > 1
    SP(0,0) SP(1,0) SP(2,0)
#if NP > 1
    SP(0,1) SP(1,1) SP(2,1)
#endif
#endif
    :: timeout -> break
    od;
    true;
    d_step {
        if
        :: exhausted -> assert(ENDLESS)                                              /* S4: rounds without end */
        :: told
        :: !exhausted && !told ->
            assert(ALLDONE);                                                         /* S4 */
            z = 0; do :: z < NC*NP -> assert(vis[z]==1);                 /* S4 */
                                      z++ :: else -> break od;
            z = 0;
            do
            :: z < NSLOT -> assert(!(st[z]==PREP && S_L(z)==lin && rec[RP(S_L(z),S_C(z),S_R(z),S_P(z))]==REF(S_D(z),S_A(z))));  /* S4 */
                            z++
            :: else -> break
            od; true
        fi; true }
}
