package scenarios

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/scenarios/history"
)

type workerChild struct {
	*childSpec
	*pipe
	lock  Lock
	store resource.Store
}

func workerProcess(spec *childSpec, p *pipe, open Open, own OpenStore) error {
	w := workerChild{childSpec: spec, pipe: p}
	if err := w.run(context.Background(), open, own); err != nil {
		return p.report(history.Event{Name: history.Failed, Error: err.Error()}, false)
	}
	return p.report(history.Event{Name: history.Done}, false)
}

func (w *workerChild) run(ctx context.Context, open Open, own OpenStore) (err error) {
	if w.Worker.GetThenDel {
		w.Lock.Gap = func() error { return w.at(history.Event{Name: history.ReleaseGap}) }
	}
	lock, err := open(ctx, w.Lock)
	if err != nil {
		return err
	}
	if lock == nil {
		return errors.New("open: got no lock and no error")
	}
	defer func() { err = errors.Join(err, lock.Close()) }()
	if w.store, err = openStore(ctx, w.childSpec, own); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.store.Close()) }()
	w.lock = checkedLock{lock, w.childSpec}
	lease, err := w.acquire(ctx)
	if err != nil {
		return err
	}
	err = w.at(history.Event{
		Name: history.Acquired, Key: w.Keys[0], Token: lease.Fence(), TTL: history.Duration(lease.TTL()), Until: lease.Until(),
	})
	ledgers := w.Keys[:1]
	switch {
	case w.Worker.Idle:
		ledgers = nil
	case w.Worker.Second:
		ledgers = w.Keys
	}
	wrote := true
	for _, key := range ledgers {
		if err == nil && wrote {
			wrote, err = w.write(ctx, lease, key)
		}
	}
	return errors.Join(err, w.release(ctx, lease))
}

// at stops the worker, except after [history.Held] and [history.Sent].
func (w *workerChild) at(e history.Event) error {
	return w.report(e, e.Name != history.Held && e.Name != history.Sent)
}

func (w *workerChild) acquire(ctx context.Context) (Lease, error) {
	if w.Worker.Try {
		lease, err := w.lock.TryAcquire(ctx, w.Keys[0])
		if !errors.Is(err, dlock.ErrHeld) {
			return lease, err
		}
		if err := w.at(history.Event{Name: history.Held}); err != nil {
			return nil, err
		}
	}
	return w.lock.Acquire(ctx, w.Keys[0])
}

// write reports whether it appended the worker's entry. It ignores the lease's context: a request that is cut off may still
// arrive, so using it would only hide the hazard.
func (w *workerChild) write(ctx context.Context, lease Lease, key string) (wrote bool, err error) {
	token := lease.Fence()
	at := func(name, ledger string) error { return w.at(history.Event{Name: name, Token: token, Value: ledger}) }
	rec, err := w.read(ctx, key, token)
	if _, stale := errors.AsType[*resource.StaleTokenError](err); stale {
		return false, at(history.ReadStale, "")
	}
	if err != nil && !errors.Is(err, resource.ErrNotFound) { // not found: the ledger is empty
		return false, err
	}
	ledger := string(rec.Value)
	if err := at(history.Read, ledger); err != nil {
		return false, err
	}
	ledger = history.Append(ledger, w.Name)
	if err := at(history.BeforeWrite, ledger); err != nil {
		return false, err
	}
	if w.Worker.Outlive {
		if err := outlive(ctx, lease); err != nil {
			return false, err
		}
		if err := w.at(history.Event{Name: history.Lost, Token: token, Until: lease.Until()}); err != nil {
			return false, err
		}
	}
	if w.Worker.Check {
		if lease.Context().Err() != nil {
			return false, at(history.LostLease, "")
		}
		if err := at(history.Checked, ""); err != nil {
			return false, err
		}
	}
	if w.Sent {
		if err := at(history.Sent, ""); err != nil { // the Runner waits until the link holds it
			return false, err
		}
	}
	err = w.store.Write(ctx, key, resource.Fence{Token: token, Seq: 1}, []byte(ledger))
	stale, refused := errors.AsType[*resource.StaleTokenError](err)
	switch {
	case err == nil || refused && stale.Applied:
		return true, at(history.Wrote, ledger)
	case refused:
		return false, at(history.WriteStale, "")
	}
	return false, err
}

func (w *workerChild) read(ctx context.Context, key string, token uint64) (resource.Record, error) {
	if w.Fencing == history.FencingOn {
		return w.store.ReadFenced(ctx, key, resource.Fence{Token: token})
	}
	return w.store.Read(ctx, key)
}

const releaseTimeout = time.Minute

func (w *workerChild) release(ctx context.Context, lease Lease) error {
	ctx, cancel := context.WithTimeout(ctx, releaseTimeout)
	defer cancel()
	err := lease.Release(ctx)
	name := history.Released
	switch {
	case err == nil:
	case errors.Is(err, dlock.ErrForeignRelease):
		name = history.ReleaseForeign
	case errors.Is(err, dlock.ErrLost):
		name = history.ReleaseLost
	default:
		return fmt.Errorf("release: %w", err)
	}
	return w.at(history.Event{Name: name, Token: lease.Fence()})
}

// overdue is how long a context may outlive its lease.
const overdue = 500 * time.Millisecond

// outlive waits until the lease is lost. A stall of this process doesn't count as a defect of the lock.
func outlive(ctx context.Context, lease Lease) error {
	for {
		end := lease.Until().Add(overdue) // a renewal moves it
		timer := time.NewTimer(time.Until(end))
		select {
		case <-lease.Context().Done():
			timer.Stop()
			return nil
		case <-ctx.Done():
			timer.Stop()
			return context.Cause(ctx)
		case <-timer.C:
		}
		if !lease.Until().Add(overdue).After(end) && lease.Context().Err() == nil {
			return fmt.Errorf("the lease's context is still live %v after the end of the lease", overdue)
		}
	}
}

// openStore connects for each call: with an older connection, the outcome would depend on when a fault of it is noticed.
func openStore(ctx context.Context, spec *childSpec, own OpenStore) (resource.Store, error) {
	off := spec.Fencing == history.FencingOff
	if !spec.Direct {
		transport := &http.Transport{DisableKeepAlives: true}
		c, err := resource.NewClient(spec.URL, &resource.ClientOptions{HTTPClient: &http.Client{Transport: transport}, AllowUnfenced: off})
		return client{c}, err
	}
	s, err := openOwn(ctx, own, StoreSpec{Store: spec.Store, Addr: spec.URL, Worker: true, Held: spec.Sent})
	if err != nil || !off {
		return workerStore{Store: s}, err
	}
	o, err := overwriter(spec.Store, s)
	return workerStore{s, o}, err
}

type client struct{ *resource.Client }

func (c client) Write(ctx context.Context, key string, f resource.Fence, value []byte) error {
	if f.Token == 0 {
		return c.WriteUnfenced(ctx, key, value)
	}
	return c.Client.Write(ctx, key, f, value)
}

func openOwn(ctx context.Context, open OpenStore, s StoreSpec) (resource.Store, error) {
	if open == nil {
		return nil, fmt.Errorf("child processes can't open the store %s: pass Runner.Store.Open to scenarios.ChildWithStore in "+
			"TestMain or main", s.Store)
	}
	return open.open(ctx, s)
}
