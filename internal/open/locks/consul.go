package locks

import (
	"context"
	"errors"
	"net/http"
	"strings"

	"github.com/hashicorp/consul/api"

	"github.com/fencelab/fencelab/dlock/consullock"
)

func openConsul(_ context.Context, s Spec) (*Backend, error) {
	addr, err := s.one()
	if err != nil {
		return nil, err
	}
	if !strings.Contains(addr, "://") {
		addr = "http://" + addr
	}
	transport := &http.Transport{DialContext: s.Dial}
	c, err := api.NewClient(&api.Config{Address: addr, HttpClient: &http.Client{Transport: transport}})
	if err != nil {
		return nil, errors.New("locks: the Consul address is not a URL")
	}
	b, err := consullock.New(c, &consullock.Options{MinSessionTTL: s.MinSession})
	return opened(b, err, client{
		ping: func(ctx context.Context) error {
			_, err := c.Status().LeaderWithQueryOptions((&api.QueryOptions{}).WithContext(ctx))
			return err
		},
		close: func() error { transport.CloseIdleConnections(); return nil },
	})
}
