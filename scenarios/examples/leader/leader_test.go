// Package leader_test checks Kubernetes' leader election for the promises that users expect of a lock. It is a module of its own,
// so that nobody else downloads Kubernetes' client.
package leader_test

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"path"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	coordination "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	typed "k8s.io/client-go/kubernetes/typed/coordination/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"k8s.io/klog/v2"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/scenarios"
	"github.com/fencelab/fencelab/scenarios/promises"
)

func open(_ context.Context, s scenarios.LockSpec) (scenarios.Lock, error) {
	client, err := typed.NewForConfig(&rest.Config{
		Host: "http://" + s.Addrs[0], QPS: -1, ContentConfig: rest.ContentConfig{ContentType: "application/json"},
	})
	if err != nil {
		return nil, err
	}
	return scenarios.Adapter{Get: func(ctx context.Context, key string, wait bool) (scenarios.Grant, error) {
		me, life := uuid.NewString(), context.WithoutCancel(ctx)
		life, stop := context.WithCancel(life)
		leading, other, stopped := make(chan context.Context, 1), make(chan struct{}, 1), make(chan struct{})
		elector, err := leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
			Lock: &resourcelock.LeaseLock{
				LeaseMeta: meta.ObjectMeta{Namespace: "locks", Name: fmt.Sprintf("%x", sha256.Sum256([]byte(key)))},
				Client:    client, LockConfig: resourcelock.ResourceLockConfig{Identity: me},
			},
			LeaseDuration: s.TTL, RenewDeadline: s.TTL * 2 / 3, RetryPeriod: s.TTL / 8, // 15 s, 10 s and 2 s by default
			ReleaseOnCancel: true,
			Callbacks: leaderelection.LeaderCallbacks{
				OnStartedLeading: func(ctx context.Context) { leading <- ctx },
				OnStoppedLeading: func() {},
				OnNewLeader: func(who string) {
					if who != me && who != "" && !wait { // there is no try
						select {
						case other <- struct{}{}:
						default:
						}
					}
				},
			},
		})
		if err != nil {
			stop()
			return scenarios.Grant{}, err
		}
		go func() {
			defer close(stopped)
			elector.Run(life)
		}()
		select {
		case holds := <-leading:
			return scenarios.Grant{TTL: s.TTL, Lost: holds.Done(), Release: func(ctx context.Context) error {
				stop()
				select {
				case <-stopped: // it doesn't report the outcome of the release
					return nil
				case <-ctx.Done():
					return ctx.Err()
				}
			}}, nil
		case <-other:
			err = dlock.ErrHeld
		case <-ctx.Done():
			err = ctx.Err()
		}
		stop()
		return scenarios.Grant{}, err
	}}, nil
}

func TestMain(m *testing.M) {
	klog.SetLogger(klog.New(nil))
	m.Run()
}

// imitation serves Lease objects as an API server does: a change needs the version that it read.
func imitation() http.Handler {
	var mu sync.Mutex
	leases, version := map[string]*coordination.Lease{}, 0
	kind := coordination.Resource("leases")
	serve := func(r *http.Request) (*coordination.Lease, error) {
		var sent coordination.Lease
		if r.Method != http.MethodGet {
			if err := json.NewDecoder(r.Body).Decode(&sent); err != nil {
				return nil, err
			}
		}
		mu.Lock()
		defer mu.Unlock()
		name := path.Base(r.URL.Path)
		if r.Method == http.MethodPost {
			name = sent.Name
		}
		switch has := leases[name]; {
		case r.Method != http.MethodGet && (sent.Spec.LeaseDurationSeconds == nil || *sent.Spec.LeaseDurationSeconds <= 0):
			return nil, apierrors.NewInvalid(coordination.SchemeGroupVersion.WithKind("Lease").GroupKind(), name, nil)
		case r.Method == http.MethodPost && has != nil:
			return nil, apierrors.NewAlreadyExists(kind, name)
		case r.Method != http.MethodPost && has == nil:
			return nil, apierrors.NewNotFound(kind, name)
		case r.Method == http.MethodGet:
			return has, nil
		case r.Method == http.MethodPut && sent.ResourceVersion != has.ResourceVersion:
			return nil, apierrors.NewConflict(kind, name, errors.New("it has been changed"))
		}
		version++
		sent.ResourceVersion = strconv.Itoa(version)
		leases[name] = &sent
		return &sent, nil
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		lease, err := serve(r)
		if status := apierrors.APIStatus(nil); errors.As(err, &status) {
			w.WriteHeader(int(status.Status().Code))
			_ = json.NewEncoder(w).Encode(status.Status())
		} else if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
		} else {
			_ = json.NewEncoder(w).Encode(lease)
		}
	})
}

func TestPromises(t *testing.T) {
	server := httptest.NewServer(imitation())
	defer server.Close()
	r := promises.Run(t, promises.Kit{
		Open: open, Module: "k8s.io/client-go", TTL: 2 * time.Second,
		Service: &scenarios.Service{
			Lock: "leader-election", NoTokens: true, Server: "an imitation of the API server",
			Nodes: []scenarios.Node{{Name: "api", Addr: strings.TrimPrefix(server.URL, "http://")}},
		},
	})
	for _, row := range r.Rows {
		if row.Verdict == promises.Kept && row.Promise == "OddTTLs" {
			t.Errorf("it keeps %s now, says the report", row.Promise)
		}
	}
}
