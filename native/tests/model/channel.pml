/* A model of native/shm/channel.hpp for spin: take (claiming, owned), commit (install, live, tail), help, pin, unpin,
 * cursors of reliable subscribers, death of any participant between any two steps and its recovery.
 *
 * Every atomic operation of the code is one atomic step here; sequential consistency is assumed (the code uses nothing
 * else for what decides). Sizes and numbers are set by -D: PUBLISHERS, SUBSCRIBERS, SLOTS, MESSAGES (each publisher),
 * DEATHS (in all), RELIABLE.
 *
 * Checked, in every interleaving: no slot is written while somebody who pinned it reads; a pinned message stays the one
 * that was pinned; the ring names messages contiguously; a reliable subscriber misses none; at the end every slot is
 * free or live and held by nobody; nobody waits for ever (no invalid end state).
 */
#ifndef PUBLISHERS
#define PUBLISHERS 1
#endif
#ifndef SUBSCRIBERS
#define SUBSCRIBERS 2
#endif
#ifndef SLOTS
#define SLOTS 4
#endif
#ifndef MESSAGES
#define MESSAGES 3
#endif
#ifndef DEATHS
#define DEATHS 1
#endif
#ifndef RELIABLE
#define RELIABLE 1
#endif
#define TOTAL (PUBLISHERS * MESSAGES + 2)
#define FREE 0
#define OWNED 1
#define CLAIMING 2
#define LIVE 3

byte kind[SLOTS], owner[SLOTS], sequence[SLOTS]; /* one word in the code: always changed in one step */
bool held[SLOTS * SUBSCRIBERS];                   /* bit of (slot, subscriber) */
byte content[SLOTS];                              /* which message's bytes are in the slot; 0: being written */
byte ring[TOTAL + 1];                             /* slot + 1 of each sequence; 0: not installed. No laps: it is long enough */
byte installed_by[TOTAL + 1];
byte tail = 1;
byte cursor[SUBSCRIBERS];
bool there[SUBSCRIBERS];
byte deaths = 0;
byte finished = 0;

#define ANY_HELD(s) (held[s * SUBSCRIBERS] HELD1(s) HELD2(s))
#if SUBSCRIBERS > 1
#define HELD1(s) || held[s * SUBSCRIBERS + 1]
#else
#define HELD1(s)
#endif
#define HELD2(s)

#if SUBSCRIBERS > 1
#define WANTED(n) ((there[0] && cursor[0] <= n) || (there[1] && cursor[1] <= n))
#else
#define WANTED(n) (there[0] && cursor[0] <= n)
#endif

/* help(): completes what is installed at the tail */
inline help(t, s) {
    do
    :: atomic { t = tail; if :: t > TOTAL || ring[t] == 0 -> break :: else -> s = ring[t] - 1 fi }
       atomic { if :: kind[s] == OWNED && sequence[s] < t -> kind[s] = LIVE; sequence[s] = t; owner[s] = 0 :: else fi }
       atomic { if :: tail == t -> tail = t + 1 :: else fi }
    od;
    t = 0; s = 0
}

/* recover_publisher(me): run by whoever finds it dead, under the file lock */
inline recover_publisher(me, t, s) {
    help(t, s);
    s = 0;
    do
    :: s < SLOTS ->
       atomic {
           if
           :: kind[s] == CLAIMING && owner[s] == me -> kind[s] = LIVE; owner[s] = 0
           :: kind[s] == OWNED && owner[s] == me -> kind[s] = FREE; owner[s] = 0
           :: else
           fi;
           s++
       }
    :: else -> break
    od;
    s = 0
}

#define MAY_DIE(label) if :: true :: atomic { deaths < DEATHS -> deaths++; goto label } fi

proctype publisher(byte me) {
    byte s = 0, n = 0, t = 0, h = 0, left = MESSAGES;
again:
    do
    :: left == 0 -> goto done
    :: else ->
       /* acquire: any slot that is free or holds an old message; all choices are explored */
       atomic {
           s = 0;
           do :: s < SLOTS - 1 -> s++ :: break od;
       }
       if
       :: atomic { kind[s] == FREE -> n = sequence[s]; kind[s] = OWNED; owner[s] = me }
       :: atomic { kind[s] == LIVE && sequence[s] < tail -> n = sequence[s] }
          if
#if RELIABLE
          :: atomic { WANTED(n) -> s = 0; n = 0 } ; goto again
          :: atomic { !WANTED(n) -> skip }
#else
          :: true
#endif
          fi;
          if
          :: atomic { kind[s] == LIVE && sequence[s] == n -> kind[s] = CLAIMING; owner[s] = me }
          :: atomic { !(kind[s] == LIVE && sequence[s] == n) -> s = 0; n = 0 } ; goto again
          fi;
          MAY_DIE(dead);
          if
          :: atomic { ANY_HELD(s) -> if :: kind[s] == CLAIMING && owner[s] == me && sequence[s] == n -> kind[s] = LIVE; owner[s] = 0 :: else fi; s = 0; n = 0 } ; goto again
          :: atomic { !ANY_HELD(s) -> skip }
          fi;
          MAY_DIE(dead);
          if
          :: atomic { kind[s] == CLAIMING && owner[s] == me && sequence[s] == n -> kind[s] = OWNED }
          :: atomic { !(kind[s] == CLAIMING && owner[s] == me && sequence[s] == n) -> s = 0; n = 0 } ; goto again /* a reader put it back */
          fi
       :: atomic { !(kind[s] == FREE || (kind[s] == LIVE && sequence[s] < tail)) -> s = 0 } ; goto again
       fi;
       /* write the payload: nobody who has checked its pin may be there */
       content[s] = 0;
       MAY_DIE(dead);
       /* commit */
       do
       :: atomic { t = tail; h = (t <= TOTAL -> ring[t] : 1) }
          if
          :: h != 0 -> help(t, h)
          :: else ->
             if
             :: atomic { ring[t] == 0 && t == tail -> assert(t == 1 || ring[t - 1] != 0); ring[t] = s + 1; installed_by[t] = me; content[s] = t } ; break
             :: atomic { !(ring[t] == 0 && t == tail) -> skip }
             fi
          fi
       od;
       left--; s = 0; n = 0; t = 0; h = 0;
       MAY_DIE(dead);
       help(t, h)
    od;
dead:
    /* found dead by somebody: what it had installed counts, the rest is given back; then it comes again */
    recover_publisher(me, t, s);
    s = 0; n = 0; t = 0; h = 0;
    goto again;
done:
    finished++
}

proctype subscriber(byte me) {
    byte n = 0, s = 0, t = 0, h = 0, before = 0;
    bool ok = false;
again:
    do
    :: n = cursor[me];
       if
       :: atomic { n > TOTAL || (ring[n] == 0 && finished == PUBLISHERS) -> goto done }
       :: atomic { n <= TOTAL && ring[n] != 0 -> s = ring[n] - 1 }
       fi;
       held[s * SUBSCRIBERS + me] = true; /* the bit first */
       MAY_DIE(dead);
       ok = false;
       do /* then the state */
       :: atomic { kind[s] == LIVE && sequence[s] == n -> ok = true; break }
       :: atomic { kind[s] == CLAIMING && sequence[s] == n -> kind[s] = LIVE; owner[s] = 0; ok = true; break }
       :: atomic { kind[s] == OWNED && sequence[s] < n -> skip } ; help(t, h)
       :: atomic { !(kind[s] == LIVE && sequence[s] == n) && !(kind[s] == CLAIMING && sequence[s] == n) && !(kind[s] == OWNED && sequence[s] < n) -> break }
       od;
       if
       :: ok ->
          assert(content[s] == n);
          MAY_DIE(dead);
          cursor[me] = n + 1;
          MAY_DIE(dead);
          assert(content[s] == n && kind[s] != OWNED); /* still whole while pinned */
       :: else ->
#if RELIABLE
          assert(false); /* a reliable subscriber missed one */
#endif
          cursor[me] = n + 1
       fi;
       held[s * SUBSCRIBERS + me] = false;
       s = 0; n = 0; ok = false
    od;
dead:
    /* recover_subscriber: no longer waited for, bits taken away; then it joins again at the tail */
    there[me] = false;
    s = 0;
    do :: s < SLOTS -> held[s * SUBSCRIBERS + me] = false; s++ :: else -> break od;
    help(t, h);
    atomic { cursor[me] = tail; there[me] = true };
    atomic { cursor[me] = tail; s = 0; n = 0; ok = false };
    goto again;
done:
    atomic { there[me] = false; finished = finished }
}

init {
    byte i = 0;
    atomic {
        do :: i < SUBSCRIBERS -> cursor[i] = 1; there[i] = true; i++ :: else -> break od;
        i = 1;
        do :: i <= PUBLISHERS -> run publisher(i); i++ :: else -> break od;
        i = 0;
        do :: i < SUBSCRIBERS -> run subscriber(i); i++ :: else -> break od;
        i = 0
    }
    (_nr_pr == 1); /* all have ended */
    do
    :: i < SLOTS -> assert(kind[i] == FREE || kind[i] == LIVE); assert(!ANY_HELD(i)); i++
    :: else -> break
    od;
    assert(tail == TOTAL || ring[tail] == 0);
    assert(ring[tail] == 0)
}
