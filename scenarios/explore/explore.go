// Package explore runs random schedules, hundreds a second, over the real code of a lock's clients in virtual time, to find one
// that breaks a promise.
//
// Clients, their connections and the servers live in one testing/synctest bubble. A schedule makes clients call the lock, one
// call at a time, and injects faults. Each client has its own message latency, so no two events coincide, and with GOMAXPROCS=1 a
// schedule always runs the same way. Connections deliver once and in order, as TCP does; a server executes a request twice only
// if the client repeats it over another connection ([Report.Repeats]).
//
// Grants are checked as they are made and the history after each step, see [Finding]. At the end all faults are lifted. Every
// call must then return, and the lock must be granted to a new client, then to every live client that waits. A schedule that
// breaks something is shrunk.
//
// Not covered: power loss of a server, and what happens while it is down; a process frozen between two instructions (a frozen
// client's code runs, but its messages stop in both directions); clocks that differ or are set back; a lease whose context
// doesn't end when it is lost; other random backoffs; effects on other keys; wrong errors after a fault of a server; dialing
// while a fault is in force, see [Client.Dial]; a second grant, with any token, during a lease in which a server lost its data or
// its clock jumped.
//
// Schedules aren't generated from the model, which has no network, clock or client code, where the defects are. pgregory.net/rapid
// would replace only the 30 lines that shrink a schedule; those have no time limit, so every machine finds the same one.
package explore

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/internal/jitter"
	"github.com/fencelab/fencelab/internal/observe"
	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/resource/storetest"
	"github.com/fencelab/fencelab/scenarios"
	"github.com/fencelab/fencelab/scenarios/history"
	"github.com/fencelab/fencelab/scenarios/model"
)

// System is a lock and its servers.
type System struct {
	Name    string
	TTL     time.Duration
	Servers int // at least one
	// Serve starts a server within the bubble.
	Serve func(t testing.TB) Server
	// Open opens a client's lock, which connects by c.Dial to c.Addr. A lease may have a method Renew(context.Context) error.
	Open func(c *Client) (scenarios.Lock, error)
	// Store opens what a client's holders read and write, likewise. [storetest.Judge] then checks its replies, instead of the
	// history. Default: one resource.Memory for all clients.
	Store func(c *Client) (resource.Store, error)
	// Greeting is the number of messages each way that begin a connection.
	Greeting int
	// NoTokens says that the lock has no fencing tokens; its holders don't read or write.
	NoTokens bool
	// Together is how many workers, from the first, are goroutines of one process. They share leases, which have a method Next()
	// (token, seq uint64) like dlock.Handle's. 0: each worker is a process.
	Together int
	// Without lists faults that schedules don't use, because the lock doesn't promise to tolerate them.
	Without []Verb
	// Fencing is the resource.Memory's mode. Default: on.
	Fencing history.Fencing
	// Gap says that a release is two requests, and calls Client.Gap, if not nil, between them.
	Gap bool
	// Wait bounds the time from the end of all faults, or a grant, to the next grant. Default: two TTLs. Without a fault the
	// bound is always half a TTL.
	Wait time.Duration
}

// Server is one of a lock's servers, in this process.
type Server interface {
	Dial() (net.Conn, error)
	// Restart closes all connections; wipe deletes the data.
	Restart(wipe bool)
	// Jump sets the clock by which leases expire forward by d.
	Jump(d time.Duration)
}

// Finding is a promise that a schedule has broken.
type Finding string

// The findings. Corrupted and Impossible are about a history over resource.Memory, WrongAnswer is about System.Store.
const (
	TwoHolders   Finding = "two holders" // a grant during another client's lease
	TokenRegress Finding = "token"       // a token not greater than that of an earlier grant
	LateRenewal  Finding = "renewal"     // a lease was renewed after a grant to another client
	LateRelease  Finding = "release"     // a release succeeded after a grant to another client
	Corrupted    Finding = "corrupted"   // the judge calls the history violated
	Impossible   Finding = "impossible"  // the model has no such run
	Stuck        Finding = "stuck"       // a free lock was not granted, or a call didn't return, see System.Wait
	WrongError   Finding = "wrong error" // a call failed although its client and the servers had no fault
	WrongAnswer  Finding = "store"       // System.Store broke a rule of resource.Store
)

// Result is the outcome of a schedule.
type Result struct {
	Finding Finding // empty: nothing was broken
	Detail  string
	Step    int // the step after which it was found, from 1; 0: after the last
	Trace   string
	Grants  int
	met     map[string]Verb // the steps that had an effect, see Report.Met
	repeats int             // requests repeated over another connection
	reached []progress      // after each step
}

// progress is how far a run has come.
type progress struct{ lines, requests int }

// Run runs a schedule in virtual time. This module's locks have the same random backoffs in each run.
func (sys *System) Run(t *testing.T, s Schedule) (r Result) {
	t.Helper()
	if runtime.GOMAXPROCS(0) != 1 {
		t.Fatal("explore: call runtime.GOMAXPROCS(1) in TestMain: with more processors a schedule does something else each time")
	}
	sys.inBubble(t, func(w *world) { r = w.run(s) })
	return r
}

func (sys *System) inBubble(t *testing.T, f func(w *world)) {
	t.Helper()
	jitter.Seed(1)
	synctest.Test(t, func(t *testing.T) { f(&world{sys: sys, t: t, slow: 1, settled: synctest.Wait}) })
}

// Replay runs a schedule in real time, on servers that Serve connects to. Leases and waits last slow times as long, to tolerate
// stalls of the machine. After each step it waits, but not for long, until as much has happened as in the virtual run.
func (sys *System) Replay(t *testing.T, s Schedule, slow int, virtual Result) Result {
	t.Helper()
	slower := *sys
	slower.TTL, slower.Wait = slower.TTL*time.Duration(slow), slower.Wait*time.Duration(slow)
	w := &world{sys: &slower, t: t, slow: time.Duration(slow)}
	w.settled = func() {
		time.Sleep(slower.TTL / 1000) // for what shows nowhere
		for began := time.Now(); time.Since(began) < slower.TTL/20; time.Sleep(time.Millisecond) {
			if n := len(w.reached); n >= len(virtual.reached) || w.progress().atLeast(virtual.reached[n]) {
				return
			}
		}
	}
	return w.run(s)
}

func (p progress) atLeast(q progress) bool { return p.lines >= q.lines && p.requests >= q.requests }

func (w *world) progress() progress {
	w.mu.Lock()
	defer w.mu.Unlock()
	p := progress{lines: strings.Count(w.trace.String(), "\n")}
	for _, k := range w.workers {
		if k != nil {
			p.requests += k.client.sent()
		}
	}
	return p
}

type world struct {
	Result
	sys     *System
	t       *testing.T
	servers []Server
	workers [MaxWorkers + 1]*worker       // the last is that of probe
	shared  *process                      // of the workers that share leases
	ttl     [MaxWorkers + 1]time.Duration // of workers with a TTL of their own; 0: System.TTL
	data    *resource.Memory
	memory  resource.Store
	slow    time.Duration               // a factor
	settled func()                      // waits until only timers are pending
	builder *hazardBuilder              // nil unless a hazard is wanted, see Hazard
	roles   map[string]scenarios.Worker // of the hazard that Play runs; nil otherwise

	mu          sync.Mutex
	trace       strings.Builder
	events      []history.Event
	judged      int               // how many of events are judged
	calls       []*storetest.Call // of System.Store
	clock       int64
	serverFault bool
	latest      int
	drifted     bool           // a server's clock has jumped. Locks must tolerate a first jump of 1 % of the usual TTL, as drift
	forgot      time.Time      // when a server last lost data, or its clock jumped
	top         resource.Fence // the greatest fence that a grant began with since a server last lost data
}

// settle is the time after each step: longer than its messages take. The odd nanoseconds keep steps apart from what clients do
// whole milliseconds after an earlier step.
const settle = 5*time.Millisecond + 101*time.Nanosecond

func (w *world) serve(about history.Run) {
	w.met = map[string]Verb{}
	for range w.sys.Servers {
		w.servers = append(w.servers, w.sys.Serve(w.t))
	}
	about.Fencing, about.Lock = cmp.Or(w.sys.Fencing, history.FencingOn), w.sys.Name
	w.data = resource.NewMemory()
	w.memory = fencing{observe.Store(w.data, w.decided), about.Fencing}
	w.add(history.Event{Kind: history.KindRun, Run: &about})
}

type fencing struct {
	resource.Overwriter
	mode history.Fencing
}

func (f fencing) ReadFenced(ctx context.Context, key string, fence resource.Fence) (resource.Record, error) {
	if f.mode != history.FencingOn {
		return f.Read(ctx, key)
	}
	return f.Overwriter.ReadFenced(ctx, key, fence)
}

func (f fencing) Write(ctx context.Context, key string, fence resource.Fence, value []byte) error {
	if f.mode == history.FencingOff {
		return f.Overwrite(ctx, key, fence, value)
	}
	return f.Overwriter.Write(ctx, key, fence, value)
}

func (w *world) run(s Schedule) Result {
	w.t.Helper()
	for i, st := range s {
		if st.Server >= w.sys.Servers {
			w.t.Fatalf("explore: step %d, %q: there are %d servers, which count from 0", i+1, st, w.sys.Servers)
		}
	}
	w.serve(history.Run{TokensLost: true})
	for i, st := range s {
		w.step(st)
		w.pass(settle)
		w.reached = append(w.reached, w.progress())
		if w.check() {
			w.Step = i + 1
			break
		}
	}
	w.end()
	w.mu.Lock()
	defer w.mu.Unlock()
	w.Trace = w.trace.String()
	return w.Result
}

func (w *world) pass(d time.Duration) {
	time.Sleep(d)
	w.settled()
}

func (w *world) found(f Finding, format string, args ...any) {
	if w.Finding == "" && w.roles == nil && (w.builder == nil || f == Stuck) {
		w.Finding, w.Detail = f, fmt.Sprintf(format, args...)
		fmt.Fprintf(&w.trace, "%s: %s\n", w.Finding, w.Detail)
	}
}

func (w *world) note(format string, args ...any) { fmt.Fprintf(&w.trace, format+"\n", args...) }

func (w *world) add(e history.Event) {
	e.Time, e.Actor = time.Now(), cmp.Or(e.Actor, "controller")
	w.events = append(w.events, e)
}

func (w *world) decided(d observe.Decision) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.add(history.Event{
		Actor: scenarios.Resource, Kind: history.KindDecision, Op: d.Op, Key: d.Key, Token: d.Fence.Token, Seq: d.Fence.Seq,
		Seen: d.Seen.Token, SeenSeq: d.Seen.Seq, Accepted: d.Accepted, Enforced: d.Enforced, Value: string(d.Value),
	})
	w.note("store: %s %d.%d accepted %v", d.Op, d.Fence.Token, d.Fence.Seq, d.Accepted)
}

const key = "key"

type process struct {
	client *Client
	lock   scenarios.Lock
	store  resource.Store
	dead   bool
	hit    bool
}

type worker struct {
	*world
	*process
	name string

	busy   string
	cancel context.CancelCauseFunc
	ended  bool

	actor     string // the grant's holder in the history: A1, A2, ...
	grants    int
	grant     int // the last one's number
	called    time.Time
	overtaken bool      // another client was granted the lock before it began
	renewedAt time.Time // when the call began that acquired or last renewed the lease
	lease     scenarios.Lease
	old       scenarios.Lease
	fence     resource.Fence
	at        string // the last call under the lease
	ledger    string
	release   bool

	announced bool          // Play has reported before-write
	gap       chan struct{} // closed when the release continues, see Play

	last  func()
	crowd []context.CancelFunc // ends the waits of its goroutines

	late bool // the network will hold the next write
	sent func()
}

func (w *world) worker(i int) *worker {
	if w.workers[i] == nil {
		p := w.shared
		if i >= w.sys.Together || p == nil {
			p = w.process(i, cmp.Or(w.ttl[i]*w.slow, w.sys.TTL), nil)
		}
		if i < w.sys.Together {
			w.shared = p
		}
		w.workers[i] = &worker{world: w, process: p, name: name(i)}
	}
	return w.workers[i]
}

func (w *world) process(i int, ttl time.Duration, gap func() error) *process {
	c := newClient(w.sys.Servers, func(server int) (net.Conn, error) { return w.servers[server].Dial() })
	c.Name, c.TTL, c.Gap, c.greeting = name(i), ttl, gap, w.sys.Greeting
	c.latency = 10*time.Microsecond + time.Duration(i)*time.Microsecond
	lock, err := w.sys.Open(c)
	if err != nil {
		w.t.Fatal(err)
	}
	p := &process{client: c, lock: lock, store: w.memory}
	if w.sys.Store != nil {
		if p.store, err = w.sys.Store(c); err != nil {
			w.t.Fatal(err)
		}
	}
	return p
}

func (w *world) step(st Step) {
	w.mu.Lock()
	w.note("> %v", st)
	w.mu.Unlock()
	w.apply(st)
}

// begin does a step, except for what lets time pass or makes the store decide, which it returns. w.mu is held.
func (w *world) begin(st Step) (now func()) {
	switch st.Verb {
	case Wait:
		w.meet(st.Verb, "")
		return func() { w.pass(st.For * w.slow) }
	case Restart, Wipe:
		w.meet(st.Verb, "")
		w.serverFault = true
		if st.Verb == Wipe {
			w.forgot, w.top = time.Now(), resource.Fence{}
		}
		return func() { w.servers[st.Server].Restart(st.Verb == Wipe) }
	case Jump:
		if w.drifted || st.For > w.sys.TTL/100 || slices.Max(w.ttl[:]) > 0 {
			w.forgot = time.Now()
		}
		w.meet(st.Verb, "")
		w.serverFault, w.drifted = true, true
		return func() { w.servers[st.Server].Jump(st.For) }
	default:
	}
	if st.Verb == TTL {
		if w.workers[st.Worker] == nil {
			w.ttl[st.Worker] = st.For
			w.meet(st.Verb, "")
		}
		return nil
	}
	k := w.worker(st.Worker)
	if k.dead && st.Verb != Mend && st.Verb != Deliver { // its last messages may still be in the network
		return nil
	}
	if w.builder != nil && !w.builder.step(k, st) {
		return nil
	}
	switch st.Verb {
	case Run, Try, Renew, Release, Rerelease:
		if k.busy == "" && !k.client.isFrozen() {
			k.call(st.Verb)
		}
		return nil
	case Late:
		k.late = true
	case Deliver:
		if now, k.sent = k.sent, nil; now == nil {
			return nil
		}
	case Duplicate:
		if now = k.last; now == nil {
			return nil
		}
	case Crowd:
		if k.crowd != nil || k.client.isFrozen() {
			return nil
		}
		now = k.gather
	case Cancel:
		if k.crowd == nil && (k.busy == "" || k.ended) {
			return nil
		}
		k.disperse()
		if k.busy != "" {
			k.ended = true
			k.cancel(context.Canceled)
		}
	default:
		k.hit = k.hit || st.Verb != Mend && st.Verb != Resume
		k.dead = k.dead || st.Verb == Kill
		now = func() { k.fault(st) }
	}
	w.meet(st.Verb, k.busy)
	return now
}

// gather starts a crowd. Each goroutine has its own context: children of one context end in random order.
func (k *worker) gather() {
	for range crowd {
		ctx, cancel := context.WithCancel(context.Background())
		k.crowd = append(k.crowd, cancel)
		go func() {
			if lease, err := k.lock.Acquire(ctx, key); err == nil {
				_ = lease.Release(context.WithoutCancel(ctx))
			}
		}()
		time.Sleep(100 * time.Nanosecond) // so that no two of their timers coincide
	}
}

const crowd = 12

func (k *worker) disperse() {
	for _, cancel := range k.crowd {
		cancel()
	}
	k.crowd = nil
}

func (w *world) meet(v Verb, call string) { w.met[string(v)+" "+call] = v }

func (k *worker) fault(st Step) {
	c := k.client
	switch st.Verb {
	case Pause, Resume:
		c.set(func() { c.frozen, c.freeze = st.Verb == Pause && st.N == 0, st.N })
	case Cut:
		c.fault(st.Server, requests, lose, st.N)
	case Deafen:
		c.fault(st.Server, replies, lose, st.N)
	case Hold:
		c.fault(st.Server, requests, hold, st.N)
	case Lag:
		c.fault(st.Server, replies, hold, st.N)
	case Mend:
		c.mend()
	case Reset:
		c.closeIf(func(*conn) bool { return true })
	case Kill:
		c.kill()
	default:
	}
}

func (k *worker) call(v Verb) {
	what := ""
	switch {
	case v == Rerelease && k.old != nil:
		what = "rerelease"
	case v == Rerelease:
		return
	case k.lease == nil && v == Try:
		what = "try"
	case k.lease == nil && v == Run:
		what = "acquire"
	case k.lease == nil || v == Try:
		return
	case v == Renew:
		what = "renew"
	case v == Release || k.at == "write" || k.sys.NoTokens:
		what = "release"
	case k.at == "":
		what = "read"
	default:
		what = "write"
	}
	if _, ok := k.lease.(renewer); what == "renew" && !ok {
		return
	}
	if k.builder != nil {
		k.builder.call(k, what)
	}
	k.meet(v, what)
	ctx, cancel := context.WithCancelCause(context.Background())
	k.busy, k.cancel, k.ended, k.called, k.overtaken = what, cancel, false, time.Now(), k.grant != k.latest
	go func() {
		err := k.do(ctx, what)
		k.mu.Lock()
		defer k.mu.Unlock()
		cancel(nil)
		k.busy = ""
		k.finished(what, err)
	}()
}

type renewer interface {
	Renew(ctx context.Context) error
}

func (k *worker) do(ctx context.Context, what string) (err error) {
	switch what {
	case "try", "acquire":
		acquire := k.lock.Acquire
		if what == "try" {
			acquire = k.lock.TryAcquire
		}
		lease, err := acquire(ctx, key)
		if err == nil {
			k.mu.Lock()
			if !k.dead {
				k.granted(lease)
			}
			k.mu.Unlock()
		}
		return err
	case "renew":
		return k.lease.(renewer).Renew(ctx)
	case "rerelease":
		return k.old.Release(ctx)
	case "release":
		k.mu.Lock()
		k.release = true
		k.mu.Unlock()
		return k.lease.Release(ctx)
	case "read":
		rec, err := k.request(k.fence, nil, func() (resource.Record, error) { return k.store.ReadFenced(ctx, key, k.fence) })
		if err == nil || errors.Is(err, resource.ErrNotFound) {
			k.ledger, err = string(rec.Value), nil
		}
		return err
	}
	value := []byte(history.Append(k.ledger, k.actor))
	k.mu.Lock()
	if !k.announced {
		k.event(history.BeforeWrite, func(e *history.Event) { e.Value = string(value) })
	}
	k.announced = false
	k.mu.Unlock()
	fence := k.next(k.lease)
	send := func(ctx context.Context) error {
		_, err := k.request(fence, value, func() (resource.Record, error) { return resource.Record{}, k.store.Write(ctx, key, fence, value) })
		return err
	}
	if k.sys.Store != nil {
		k.last = func() { go func() { _ = send(context.WithoutCancel(ctx)) }() }
		return send(ctx)
	}
	write := func() error { return send(context.WithoutCancel(ctx)) }
	done := make(chan error, 1)
	k.mu.Lock()
	k.last = func() { _ = write() }
	late := k.late
	if late {
		k.late, k.sent = false, func() { done <- write() }
		if k.roles != nil || k.builder != nil {
			k.event(history.Sent, nil)
		}
	}
	k.mu.Unlock()
	if !late {
		return write()
	}
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (k *worker) request(f resource.Fence, value []byte, send func() (resource.Record, error)) (resource.Record, error) {
	k.mu.Lock()
	k.clock++
	c := &storetest.Call{Fence: f, Value: value, Begin: k.clock, Err: context.Canceled}
	k.calls = append(k.calls, c)
	k.mu.Unlock()
	rec, err := send()
	k.mu.Lock()
	defer k.mu.Unlock()
	k.clock++
	c.End, c.Record, c.Err = k.clock, rec, err
	return rec, err
}

func (k *worker) next(lease scenarios.Lease) resource.Fence {
	if h, ok := lease.(interface{ Next() (token, seq uint64) }); ok && k.sys.Together > 0 {
		return resource.NewFence(h.Next())
	}
	return resource.NewFence(lease.Fence(), k.fence.Seq+1)
}

func (k *worker) granted(lease scenarios.Lease) {
	k.grants++
	k.Grants++
	k.actor = fmt.Sprint(k.name, k.grants)
	if k.roles != nil {
		k.actor = k.name
	}
	k.note("%s: granted %d", k.actor, lease.Fence())
	k.lease, k.at, k.release, k.renewedAt, k.fence = lease, "", false, k.called, resource.Fence{Token: lease.Fence()}
	if !k.excused() && lease.Until().After(time.Now()) { // a grant may arrive after its lease has ended or was forgotten
		k.latest++
	}
	k.grant = k.latest
	if k.sys.Together > 0 {
		k.fence = k.next(lease)
	}
	k.exclusive()
	if !k.excused() && !k.sys.NoTokens {
		if k.fence.Compare(k.top) <= 0 {
			k.found(TokenRegress, "%s was granted token %d.%d after %d.%d", k.actor, k.fence.Token, k.fence.Seq, k.top.Token, k.top.Seq)
		}
		k.top = k.top.Max(k.fence)
	}
	k.event(history.Acquired, func(e *history.Event) { e.Key = key })
}

// exclusive checks that at most one worker has the lock.
func (w *world) exclusive() {
	var holder *worker
	for _, k := range w.workers {
		if k == nil || k.dead || k.release || k.lease == nil || !k.lease.Until().After(time.Now()) || k.excused() {
			continue
		}
		if holder != nil {
			w.found(TwoHolders, "%s has the lock with token %d while the lease of %s, token %d, lasts", k.actor, k.lease.Fence(), holder.actor, holder.lease.Fence())
		}
		holder = k
	}
}

// excused reports whether a server may have forgotten the worker's lease, or ended it too early: the lease began before and
// hasn't been renewed since. Passing a shared lease on is no renewal.
func (k *worker) excused() bool {
	began := k.lease.Until().Add(-k.client.TTL) // or a little later: locks end leases before their servers do
	return !began.After(k.forgot) && (!k.renewedAt.After(k.forgot) || k.sys.Together > 0)
}

func (k *worker) event(name string, set func(*history.Event)) {
	e := history.Event{Actor: k.actor, Kind: history.KindReport, Name: name, Token: k.lease.Fence()}
	if set != nil {
		set(&e)
	}
	k.add(e)
	if k.builder != nil {
		k.builder.report(k, name)
	}
}

func (k *worker) finished(what string, err error) {
	if k.dead {
		return
	}
	unexplained := err != nil && !k.ended && !k.hit && !k.serverFault
	stale, refused := errors.AsType[*resource.StaleTokenError](err)
	switch {
	case err == nil:
		k.note("%s: %s", cmp.Or(k.actor, k.name), what)
	case refused:
		k.note("%s: %s refused", k.actor, what)
	default:
		k.note("%s: %s failed", cmp.Or(k.actor, k.name), what)
	}
	switch what {
	case "read", "write":
		names := map[bool]string{true: history.ReadStale, false: history.Read}
		if what == "write" {
			names = map[bool]string{true: history.WriteStale, false: history.Wrote}
		}
		switch {
		case err == nil, refused:
			k.event(names[refused && !stale.Applied], func(e *history.Event) {
				switch {
				case e.Name == history.Wrote:
					e.Value = history.Append(k.ledger, k.actor)
				case err == nil:
					e.Value = k.ledger
				}
			})
			k.at = what
			if refused && !stale.Applied {
				k.at = "write" // only the release is left
			}
		case unexplained, k.sys.Store == nil && !k.ended:
			k.found(WrongError, "%s: %s: %v", k.actor, what, err)
		case k.sys.Store == nil:
			k.at = "write"
		}
	case "release":
		if unexplained && k.lease.Until().After(time.Now()) {
			k.found(WrongError, "%s: release: %v", k.actor, err)
		}
		if err == nil && k.overtaken && !k.excused() && k.sys.Together == 0 {
			k.found(LateRelease, "%s has released the lock without an error though another had been granted it before", k.actor)
		}
		switch {
		case err == nil:
			k.event(history.Released, nil)
		case errors.Is(err, dlock.ErrForeignRelease):
			k.event(history.ReleaseForeign, nil)
		case errors.Is(err, dlock.ErrLost):
			k.event(history.ReleaseLost, nil)
		default:
			k.event(history.Failed, func(e *history.Event) { e.Error = err.Error() })
		}
		if k.roles != nil && k.events[len(k.events)-1].Name != history.Failed {
			k.event(history.Done, nil)
		}
		k.old, k.lease = k.lease, nil
	case "acquire":
		if unexplained {
			k.found(WrongError, "%s: acquire: %v", k.name, err)
		}
	case "try":
		if unexplained && !errors.Is(err, dlock.ErrHeld) {
			k.found(WrongError, "%s: try: %v", k.name, err)
		}
	case "renew":
		if err == nil {
			k.renewedAt = k.called
			k.exclusive()
			if k.overtaken && k.sys.Together == 0 {
				k.found(LateRenewal, "%s has renewed its lease though another has been granted the lock since", k.actor)
			}
		}
		if unexplained && k.client.TTL == k.sys.TTL && k.lease.Until().After(time.Now()) { // a lock may renew a shorter lease only a few times
			k.found(WrongError, "%s: renew: %v", k.actor, err)
		}
	}
}

func (w *world) check() (found bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.exclusive()
	if w.sys.Store != nil {
		return w.Finding != ""
	}
	if len(w.events) > w.judged {
		w.judged = len(w.events)
		if r := history.Judge(w.events); r.Verdict == history.Violated {
			w.found(Corrupted, "%s", strings.Join(r.Findings, "; "))
		}
	}
	return w.Finding != ""
}

func (w *world) end() {
	if alive := w.liftFaults(); w.finish(alive) {
		w.mu.Lock()
		if _, err := (model.Config{}).Replay(w.events); err != nil && w.modelled() {
			w.found(Impossible, "%v", err)
		}
		w.mu.Unlock()
		w.probe(alive)
	}
	w.close()
}

func (w *world) close() {
	w.mu.Lock()
	for _, k := range w.workers {
		if k != nil && k.cancel != nil {
			k.cancel(context.Canceled)
		}
	}
	w.mu.Unlock()
	for _, k := range w.workers {
		if k == nil {
			continue
		}
		w.repeats += k.client.repeats
		_ = k.lock.Close()
		_ = k.store.Close()
		k.client.kill()
		k.client.mend()
	}
	w.pass(2 * time.Second) // go-redis and others poll once a second whether they are closed
}

func (w *world) liftFaults() (alive []*worker) {
	for i, k := range w.workers {
		if k == nil {
			continue
		}
		if !k.dead {
			alive = append(alive, k)
		}
		k.disperse()
		for _, v := range []Verb{Resume, Mend, Deliver} {
			w.apply(Step{Verb: v, Worker: i})
			w.pass(settle)
		}
	}
	return alive
}

func (w *world) finish(workers []*worker) bool {
	return w.await(func() (pending *worker) {
		releases := slices.ContainsFunc(workers, func(k *worker) bool { return k.busy == "release" })
		if w.builder != nil {
			releases = true
			w.builder.finish(workers)
		}
		for _, k := range workers {
			if k.busy == "" && k.lease != nil && !releases {
				releases = true
				k.call(Release)
			}
			if pending == nil && (k.busy != "" || k.lease != nil) {
				pending = k
			}
		}
		return pending
	})
}

// probe makes a new client acquire the lock, then the waiting workers.
func (w *world) probe(alive []*worker) {
	w.mu.Lock()
	fresh := w.worker(MaxWorkers)
	w.mu.Unlock()
	// After many failures go-redis, for example, fails for another second.
	if !w.callUntil(fresh, func() bool { return fresh.lease != nil }) {
		return
	}
	if w.sys.Store != nil {
		w.checkStore(fresh)
	}
	served := map[*worker]bool{}
	for _, k := range alive {
		w.apply(Step{Verb: Run, Worker: int(k.name[0] - 'A')})
		w.pass(settle)
	}
	w.apply(Step{Verb: Release, Worker: MaxWorkers})
	w.pass(settle)
	w.await(func() (pending *worker) {
		for _, k := range alive {
			switch {
			case k.busy != "":
			case k.lease != nil:
				served[k] = true
				k.call(Release)
			case !served[k]:
				k.call(Run)
			}
			if pending == nil && (k.busy != "" || !served[k]) {
				pending = k
			}
		}
		return pending
	})
}

func (w *world) checkStore(k *worker) {
	w.callUntil(k, func() bool { return k.at == "write" })
	w.mu.Lock()
	defer w.mu.Unlock()
	if err := storetest.Judge(w.calls); err != nil {
		w.found(WrongAnswer, "%v", err)
	}
}

func (w *world) callUntil(k *worker, done func() bool) bool {
	return w.await(func() *worker {
		switch {
		case k.busy != "":
			return k
		case done():
			return nil
		}
		k.call(Run)
		return k
	})
}

// await lets time pass until no worker is pending, and reports whether that happened. If nobody is granted the lock for
// System.Wait, the pending worker is stuck.
func (w *world) await(pending func() *worker) bool {
	bound, pause := cmp.Or(w.sys.Wait, 2*w.sys.TTL), w.sys.TTL/20+settle
	if !w.serverFault && slices.Max(w.ttl[:]) == 0 && !slices.ContainsFunc(w.workers[:], func(k *worker) bool { return k != nil && k.hit }) {
		bound = w.sys.TTL / 2
	}
	for grants, waited := -1, time.Duration(0); ; waited += pause {
		w.mu.Lock()
		var k *worker
		if w.Finding == "" {
			k = pending()
		}
		if w.Grants != grants {
			grants, waited = w.Grants, 0
		}
		if k != nil && waited > bound {
			w.found(Stuck, "%s waits too long after the last fault and grant: %s", k.name, cmp.Or(k.busy, "acquire"))
		}
		done := w.Finding == ""
		w.mu.Unlock()
		if k == nil || !done {
			return done
		}
		w.pass(pause)
	}
}

// apply does a step without tracing it.
func (w *world) apply(st Step) {
	w.mu.Lock()
	now := w.begin(st)
	w.mu.Unlock()
	if now != nil {
		now()
	}
}

// modelled reports whether the model covers the whole history: few workers, no failures, a token for each grant.
func (w *world) modelled() bool {
	if w.sys.NoTokens || w.sys.Together > 0 || w.sys.Store != nil {
		return false
	}
	actors := map[string]bool{}
	for _, e := range w.events {
		if e.Name == history.Failed {
			return false
		}
		if e.Kind == history.KindReport {
			actors[e.Actor] = true
		}
	}
	return len(actors) <= model.MaxWorkers
}
