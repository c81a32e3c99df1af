package locks

import (
	"context"
	"fmt"
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
	c, err := api.NewClient(&api.Config{Address: addr, Transport: transport}) // with the environment's CONSUL_CACERT and the like
	if err != nil {
		return nil, fmt.Errorf("locks: consul: %w", err)
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
