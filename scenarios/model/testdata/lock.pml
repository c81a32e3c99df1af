/* The model of package model, for Spin: fencing on, 2 workers, 3 grants, 1 write under each. A grant's token is its
   number, and an entry is that number; a value is a list of entries as a number in base 4. What the Go model keeps for
   its invariants alone follows from the rest here. Each option is one step. */
#define N 2
#define G 3
#define Idle 0
#define Acquired 1
#define Ready 2
#define Waiting 3
#define Refused 4

byte phase[N], grant[N], seq[N], ledger[N], msg[G+1];
bool live[N], sent[G+1];
byte holder, grants, value, seenToken, seenSeq;

#define reads(i) ((phase[i] == Acquired || phase[i] == Ready))
#define waits(i, g) (phase[i] == Waiting && grant[i] == g)
#define admits(g) (sent[g] && (g > seenToken || g == seenToken && seenSeq == 0))
#define free(i) if :: holder == grant[i] -> holder = 0 :: else fi

#define WORKER(i) \
	:: d_step { phase[i] == Idle && holder == 0 && grants < G -> \
		grants++; holder = grants; phase[i] = Acquired; grant[i] = grants; live[i] = true } \
	:: d_step { live[i] -> live[i] = false; free(i) } \
	:: d_step { reads(i) && grant[i] < seenToken -> phase[i] = Refused } \
	:: d_step { reads(i) && grant[i] >= seenToken -> phase[i] = Ready; ledger[i] = value; \
		if :: grant[i] > seenToken -> seenToken = grant[i]; seenSeq = 0 :: else fi } \
	:: d_step { phase[i] == Ready && seq[i] == 0 -> phase[i] = Waiting; seq[i] = 1; \
		ledger[i] = ledger[i] * 4 + grant[i]; sent[grant[i]] = true; msg[grant[i]] = ledger[i] } \
	:: d_step { phase[i] != Idle -> free(i); phase[i] = Idle; live[i] = false; grant[i] = 0; seq[i] = 0; ledger[i] = 0 }

#define ACCEPT(g) value = msg[g]; seenToken = g; seenSeq = 1
#define ANSWER(g, i) \
	:: d_step { admits(g) && waits(i, g) -> ACCEPT(g); phase[i] = Ready } \
	:: d_step { sent[g] && !admits(g) && waits(i, g) -> \
		if :: g == seenToken && seenSeq == 1 && msg[g] == value -> phase[i] = Ready :: else -> phase[i] = Refused fi }
#define WRITE(g) \
	:: d_step { admits(g) -> ACCEPT(g) } \
	ANSWER(g, 0) \
	ANSWER(g, 1)

active proctype model() {
end:	do
	WORKER(0)
	WORKER(1)
	WRITE(1)
	WRITE(2)
	WRITE(3)
	od
}
