package scenarios

import (
	"cmp"
	"errors"
	"slices"
	"time"

	"github.com/fencelab/fencelab/faults"
	"github.com/fencelab/fencelab/scenarios/history"
)

type worker struct {
	*process
	stopped bool

	toStore *faults.Link            // nil unless the schedule holds the worker's requests
	toLock  map[string]*faults.Link // by server; nil unless the schedule cuts the worker off
	nodes   []Node                  // through the links, if any
}

func (r *run) worker(name string) (w *worker, err error) {
	if w := r.workers[name]; w != nil {
		return w, nil
	}
	w = &worker{nodes: slices.Clone(r.Service.Nodes)}
	r.workers[name] = w
	if r.s.leaves(name, history.Delayed) {
		if w.toStore, err = faults.NewLink(r.resource.hostPort()); err != nil {
			return nil, err
		}
	}
	if !r.s.has(func(st Step) bool { return st.Target == name && fault(st.Verb).From }) {
		return w, nil
	}
	w.toLock = map[string]*faults.Link{}
	for i, n := range w.nodes {
		link, addr, err := n.Link()
		if err != nil {
			return nil, err
		}
		w.toLock[n.Name], w.nodes[i].Addr = link, addr
	}
	return w, nil
}

func (r *run) start(name string, w *worker) (err error) {
	options := r.s.Workers[name]
	spec := childSpec{
		Name: name, Fencing: r.fencing, Keys: r.keys, Worker: options, Store: r.Store.Name, Direct: !r.Store.served(),
		Lock: LockSpec{
			Lock: r.Service.Lock, Variant: r.s.Variant, MinSession: r.Service.MinSession,
			TTL: longTTL, Renew: !options.NoRenew, MaxHold: cmp.Or(time.Duration(options.MaxHold), longHold),
		},
		Sent: r.s.has(func(st Step) bool { return st.Target == name && st.Until == history.Sent }),
		env:  r.Service.Env,
	}
	if options.Victim {
		spec.Lock.TTL = r.ttl
	}
	for _, n := range w.nodes {
		spec.Lock.Addrs = append(spec.Lock.Addrs, n.Addr)
	}
	link := ""
	if w.toStore != nil {
		link = w.toStore.Addr()
	}
	spec.URL = r.resource.url(link)
	w.process, err = start(spec)
	return err
}

// bypasses reports whether w, which was granted the lock, has links to the servers and used none.
func (w *worker) bypasses() bool {
	for _, link := range w.toLock {
		if link.Messages() > 0 {
			return false
		}
	}
	return w.toLock != nil
}

func (w *worker) close() error {
	var errs []error
	if w.process != nil {
		_, err := w.end()
		errs = append(errs, err)
	}
	if w.toStore != nil {
		errs = append(errs, w.toStore.Close())
	}
	for _, link := range w.toLock {
		errs = append(errs, link.Close())
	}
	return errors.Join(errs...)
}
