package scenarios

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"time"

	"github.com/fencelab/fencelab/internal/observe"
	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/scenarios/history"
)

// Store is what workers write to.
//
// A store with an Addr is a server, and workers are its clients: package pgstore's on PostgreSQL, for example. With fencing off
// they are clients that know nothing of fences. A server doesn't report its decisions, and what a worker believes is no evidence.
// So the [Runner] reads the ledger's record over a connection of its own, before and after each step of a worker; a run is serial,
// so that there is at most one call between two reads. If the fence has risen or the value has changed, the store has accepted
// that call. A call that the worker reports and that has changed nothing was refused, whatever the worker was told.
//
// A store without an Addr belongs to one process: a file, or an embedded database. The resource's
// process opens it, and serves it to the workers over HTTP, by [resource.NewHandler].
type Store struct {
	Name   string // for Open and for histories
	Server string // what serves it, e.g. "postgres 15.10 (containers)"; empty: Name
	Addr   string // where it is: what [Node] takes, or anything if nothing is to be delayed
	// Open opens the store in the process of this Runner. Workers and the resource call [ChildWithStore]'s.
	Open OpenStore
	// Volatile says that the store loses its data when its process is killed, so that a schedule that kills the resource shows
	// nothing.
	Volatile bool
	// Kill ends the server by SIGKILL, and Restart starts it again on its data. Nil: it can't be killed. A store without an Addr
	// dies with its process, and is opened again. No other run may use the server meanwhile: runs over one that can be killed
	// don't run in parallel, or have a server each. ctx bounds the call, and the server outlives it.
	Kill, Restart func(ctx context.Context) error
}

// OpenStore opens a store, which should keep the rules of [resource.Store]: package storetest says which it breaks, where a
// scenario only shows what comes of it. To run with fencing off it must be a [resource.Overwriter]. The caller closes what
// it returns, and uses it after ctx has ended, which bounds the opening alone. It must not time out a call before the schedule
// lets it go on: a write may be held up for longer than a lease lasts.
//
// After the server was killed and restarted, a worker writes by the client that it opened before: one that doesn't connect
// again by itself needs a connection for each call.
//
// A store that can tell when a write has left the process has a method OnSent(f func()), which arms f for the next bytes that
// it sends, and once. Of another one the [Runner] waits until the link holds the write.
type OpenStore func(ctx context.Context, s StoreSpec) (resource.Store, error)

// StoreSpec says which store a process needs.
type StoreSpec struct {
	Store string // the Store's Name
	Addr  string // its Addr, or that of a link which leads there and on which calls are delayed
	// Dir is where a store without an Addr keeps its data: a directory of the run's own, empty at first, and after a kill as
	// it was left.
	Dir string
	// Worker says that a worker opens it. The Runner has opened it before, so that its table or bucket is there.
	Worker bool
	// Held says that a write of the worker's will be held in the network. It must be the write that is held, and not the greeting
	// of a new connection.
	Held bool
}

// check returns an error if sc can't run over s. One that matches [errors.ErrUnsupported] says that nothing is wrong
// with either.
func (s *Store) check(sc *Scenario) error {
	if s != memory && (s.Open == nil || s.Name == "") {
		return errors.New("scenarios: Runner.Store has no Open or no Name; give it both")
	}
	cannot := func(format string, args ...any) error {
		return fmt.Errorf("scenarios: %s: %s: %w", sc.Name, fmt.Sprintf(format, args...), errors.ErrUnsupported)
	}
	if s.Volatile && sc.leaves(Resource, history.Down) {
		return cannot("%s keeps nothing over a kill", s.name())
	}
	if s.served() {
		return nil // a process of ours, to which everything else can be done
	}
	if sc.leaves(Resource, history.Down) && (s.Kill == nil || s.Restart == nil) {
		return cannot("%s can't be killed: its Store has no Kill and Restart", s.name())
	}
	for _, name := range slices.Sorted(maps.Keys(sc.Workers)) {
		if sc.Workers[name].Second {
			return cannot("worker %s has two ledgers, and over a store there is one", name)
		}
	}
	if sc.leaves("", history.Delayed) {
		addr, err := hostPort(s.Addr)
		if err == nil {
			_, _, err = net.SplitHostPort(addr)
		}
		if err != nil {
			return cannot("%s is at no host and port on the way to which a call could be late: %v", s.name(), err)
		}
	}
	return nil
}

// memory is the store of a Runner that has none. The resource's process opens it by itself.
var memory = &Store{Server: "memory", Volatile: true}

// served reports whether the resource's process opens s.
func (s *Store) served() bool { return s.Addr == "" }

func (s *Store) name() string { return cmp.Or(s.Server, s.Name) }

// open connects to s by its address.
func (s *Store) open(ctx context.Context) (resource.Store, error) {
	return s.Open.open(ctx, StoreSpec{Store: s.Name, Addr: s.Addr})
}

// open calls open, and says whose error it is.
func (open OpenStore) open(ctx context.Context, s StoreSpec) (resource.Store, error) {
	store, err := open(ctx, s)
	switch {
	case err != nil:
		return nil, fmt.Errorf("open %s: %v", s.Store, err) //nolint:errorlint // an ENOTSUP of the user's is a failure, and nothing to skip
	case store == nil:
		return nil, fmt.Errorf("open %s: got no store and no error", s.Store)
	}
	return store, nil
}

// overwriter is s without the check of fences.
func overwriter(name string, s resource.Store) (resource.Overwriter, error) {
	o, ok := s.(resource.Overwriter)
	if !ok {
		return nil, fmt.Errorf("%s can't be written to with fencing off: its %T has no Overwrite, see resource.Overwriter: %w",
			name, s, errors.ErrUnsupported)
	}
	return o, nil
}

// workerStore is a store as a worker sees it.
type workerStore struct {
	resource.Store
	bare resource.Overwriter // not nil: the worker knows nothing of fencing
}

func (s workerStore) Write(ctx context.Context, key string, f resource.Fence, value []byte) error {
	if s.bare != nil {
		return s.bare.Overwrite(ctx, key, resource.Fence{}, value)
	}
	return s.Store.Write(ctx, key, f, value)
}

// OnSent arms f if the store can tell when it sends. Else f is called at once, and the Runner waits until the link holds the write.
func (s workerStore) OnSent(f func()) {
	if s, ok := s.Store.(interface{ OnSent(f func()) }); ok {
		s.OnSent(f)
		return
	}
	f()
}

// storeTarget is a [Store] during a run.
type storeTarget struct {
	*Store
	fencing history.Fencing
	tell    func(history.Event)

	client  resource.Store
	key     string
	last    resource.Record   // what it held when it was read last
	offered map[string]string // by worker: the ledger that it is about to write
	refused int               // what workers were told, since the server was started last
	down    bool
}

func newStoreTarget(s *Store, f history.Fencing, tell func(history.Event)) *storeTarget {
	return &storeTarget{Store: s, fencing: f, tell: tell, offered: map[string]string{}}
}

// begin makes an empty ledger, which workers of a service find too, in a store that can be written to without a fence.
func (t *storeTarget) begin(ctx context.Context, keys []string) (err error) {
	t.key = keys[0]
	if t.client, err = t.open(ctx); err != nil {
		return err
	}
	bare, err := overwriter(t.Store.name(), t.client)
	switch {
	case err == nil:
		err = bare.Overwrite(ctx, t.key, resource.Fence{}, []byte{})
	case t.fencing != history.FencingOff:
		err = nil
	}
	if err != nil {
		return err
	}
	t.last, err = t.read(ctx)
	return err
}

func (t *storeTarget) name() string { return t.Store.name() }

func (t *storeTarget) hostPort() string {
	addr, _ := hostPort(t.Addr) // it has been opened
	return addr
}

func (t *storeTarget) url(link string) (string, error) {
	if link == "" {
		return t.Addr, nil
	}
	return through(t.Addr, link)
}

func (t *storeTarget) kill(ctx context.Context) error {
	if err := t.sync(ctx, nil); err != nil { // its last decisions
		return err
	}
	t.refused = 0
	if err := t.Kill(ctx); err != nil {
		return err
	}
	t.down = true
	return nil
}

// restart takes the record as it is then: what a crash has undone is no decision.
func (t *storeTarget) restart(ctx context.Context) (err error) {
	if err := t.Restart(ctx); err != nil {
		return err
	}
	t.down = false
	client, err := t.open(ctx) // the old one may not connect again by itself
	if err != nil {
		return err
	}
	_ = t.client.Close() // it was connected to the server that was killed, and may complain
	t.client = client
	t.last, err = t.read(ctx)
	return err
}

func (t *storeTarget) read(ctx context.Context) (resource.Record, error) {
	rec, err := t.client.Read(ctx, t.key)
	if errors.Is(err, resource.ErrNotFound) {
		err = nil // it is gone, which the judge detects
	}
	return rec, err
}

// call is one that a worker has made of the store, as far as it can be known without an answer.
type call struct {
	op    string
	fence resource.Fence // zero: it had none
	value string         // what was to be written
}

// callOf is the call that a report is about, nil if it is about none.
func (t *storeTarget) callOf(e *history.Event) *call {
	if e == nil {
		return nil
	}
	c := &call{}
	switch e.Name {
	case history.BeforeWrite:
		t.offered[e.Actor] = e.Value
		return nil
	case history.Read, history.ReadStale:
		c.op = observe.Read
		if t.fencing == history.FencingOn {
			c.fence = resource.Fence{Token: e.Token}
		}
	case history.Wrote, history.WriteStale:
		c.op, c.value = observe.Write, t.offered[e.Actor]
		if t.fencing != history.FencingOff {
			c.fence = resource.Fence{Token: e.Token, Seq: 1}
		}
	default:
		return nil
	}
	if e.Name == history.ReadStale || e.Name == history.WriteStale {
		t.refused++
	}
	return c
}

// sync reads the record, and reports what the store has decided since it was read last.
func (t *storeTarget) sync(ctx context.Context, told *history.Event) error {
	if t.down {
		return nil
	}
	now, err := t.read(ctx)
	if err != nil {
		return fmt.Errorf("resource: %w", err)
	}
	c := t.callOf(told)
	if d, changed := effect(t.last, now); changed {
		t.decided(t.last, d)
		t.last = now
		if c != nil && d.Op == c.op && d.Token == c.fence.Token && d.Seq == c.fence.Seq {
			return nil
		}
	}
	if c != nil {
		t.decided(now, withoutEffect(now, c))
	}
	return nil
}

// decided reports a decision of the store, whose record was that before.
func (t *storeTarget) decided(before resource.Record, d history.Event) {
	d.Kind, d.Time, d.Key = history.KindDecision, time.Now(), t.key
	d.Seen, d.SeenSeq = before.MaxFence.Token, before.MaxFence.Seq
	t.tell(d)
}

// effect is the call that has made one record of another. It reports whether there was one.
func effect(before, after resource.Record) (d history.Event, changed bool) {
	rose := after.MaxFence.Compare(before.MaxFence) > 0
	same := bytes.Equal(after.Value, before.Value) && (after.Value == nil) == (before.Value == nil)
	if !rose && same {
		return d, false
	}
	d = history.Event{Op: observe.Write, Accepted: true, Value: string(after.Value)}
	if rose { // else no fence was checked
		d.Token, d.Seq, d.Enforced = after.MaxFence.Token, after.MaxFence.Seq, true
	}
	if same && d.Seq == 0 {
		d.Op = observe.Read
	}
	return d, true
}

// withoutEffect is what a store that holds rec has decided about a call that has changed nothing. A read needn't; a write that
// was accepted has.
func withoutEffect(rec resource.Record, c *call) history.Event {
	d := history.Event{Op: c.op, Token: c.fence.Token, Seq: c.fence.Seq, Enforced: c.fence != resource.Fence{}, Value: c.value}
	if c.op == observe.Read {
		d.Accepted = !d.Enforced || rec.MaxFence.Token == c.fence.Token
		if d.Accepted {
			d.Value = string(rec.Value)
		}
	}
	return d
}

// final reads the ledger. The refusals are those that workers were told of; the judge counts those that the record shows.
func (t *storeTarget) final(ctx context.Context) (ledgers map[string]resource.Record, refused int, err error) {
	rec, err := t.read(ctx)
	return map[string]resource.Record{t.key: rec}, t.refused, err
}

func (t *storeTarget) end(context.Context) error { return nil }

// close leaves the server as it was found, also after a run that has ended while it was dead.
func (t *storeTarget) close() (err error) {
	if t.down {
		ctx, cancel := context.WithTimeout(context.Background(), DefaultStepTimeout)
		defer cancel()
		if err := t.Restart(ctx); err != nil {
			return fmt.Errorf("restart %s, which the run has killed: %w", t.Store.name(), err)
		}
	}
	if t.client == nil {
		return nil
	}
	if err := t.client.Close(); !t.down {
		return err
	}
	return nil // it was connected to the server that was killed
}
