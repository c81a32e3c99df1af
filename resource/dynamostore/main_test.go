package dynamostore_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/dynamodb"
	"github.com/stretchr/testify/require"
	"github.com/truora/minidyn/server"

	"github.com/fencelab/fencelab/internal/testmain"
	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/resource/dynamostore"
	"github.com/fencelab/fencelab/resource/internal/awstest"
)

// The tests use a server in the process, or FENCELAB_DYNAMODB_ENDPOINT, an address or "aws", with AWS_ACCESS_KEY_ID,
// AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN and AWS_REGION. They create and delete a table.
var (
	endpoint  string
	table     = "fencelab-" + rand.Text()
	transport = awstest.Transport
)

func TestMain(m *testing.M) {
	testmain.Run(awstest.Tests{M: m}, awstest.Server("FENCELAB_DYNAMODB_ENDPOINT", newFake(), &endpoint), createTable)
}

func createTable(ctx context.Context) (io.Closer, error) {
	c := newClient(transport)
	return awstest.Closer(func() error {
		_, err := c.DeleteTable(context.WithoutCancel(ctx), &dynamodb.DeleteTableInput{TableName: &table})
		return err
	}), dynamostore.CreateTable(ctx, c, table)
}

// newFake corrects minidyn, which can't keep empty bytes, and writes the items of replies while other requests change them.
func newFake() http.Handler {
	const empty, instead = `{"B":""}`, `{"B":"ZW1wdHkgdmFsdWU="}`
	fake := server.NewServer()
	var mu sync.Mutex
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		r.Body = io.NopCloser(bytes.NewReader(bytes.ReplaceAll(body, []byte(empty), []byte(instead))))
		answer := httptest.NewRecorder()
		mu.Lock()
		fake.ServeHTTP(answer, r)
		mu.Unlock()
		maps.Copy(w.Header(), answer.Header())
		w.WriteHeader(answer.Code)
		_, _ = w.Write(bytes.ReplaceAll(answer.Body.Bytes(), []byte(instead), []byte(empty)))
	})
}

func newClient(rt http.RoundTripper, more ...func(*dynamodb.Options)) *dynamodb.Client {
	o := dynamodb.Options{
		Region: awstest.Region(), Credentials: awstest.Credentials(), Retryer: awstest.Retryer(),
		HTTPClient: &http.Client{Transport: rt},
	}
	if endpoint != "aws" {
		o.BaseEndpoint = &endpoint
	}
	return dynamodb.New(o, more...)
}

func once(o *dynamodb.Options) { o.Retryer = aws.NopRetryer{} }

func open(tb testing.TB, more ...func(*dynamodb.Options)) (*dynamostore.Store, *awstest.Link) {
	tb.Helper()
	l := &awstest.Link{}
	s, err := dynamostore.New(newClient(l, more...), table)
	require.NoError(tb, err)
	tb.Cleanup(func() { require.NoError(tb, s.Close()) })
	return s, l
}

func at(token uint64) resource.Fence { return resource.Fence{Token: token, Seq: 1} }
